"""The support matrix says what targets do: every cell is compared with the lowering of its attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.compiler.cli import main
from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.ops_kv import PagedAttention
from mlsdc.compiler.types import Dim, DType, KvType, TensorType, TreeType
from mlsdc.runtime.kv_format import FORMATS, KvGeometry
from mlsdc.runtime.step import Limits
from mlsdc.targets import make_target
from mlsdc.targets.kv_support import GQA, HEAD_DIMS, WINDOWS, refused, refused_geometry
from mlsdc.targets.protocol import Declined

LIMITS = Limits(max_model_len=256, max_num_seqs=2, max_num_batched_tokens=16, max_logit_rows=16, max_tree_nodes=7)


def attention(format: str, head_dim: int, gqa: int, window: int) -> Graph:
    builder = Builder("forward")
    q = builder.input("q", TensorType(DType.F32, (Dim("rows", 1, 16), 2 * gqa, head_dim)))
    kv = builder.input("kv", KvType(format, 32, 1, 2, head_dim))
    tree = builder.input("tree", TreeType())
    return builder.build(y=builder.add("y", PagedAttention(0, head_dim**-0.5, window, 30.0 if window else 0.0), q, kv, tree))


@pytest.mark.parametrize("target", ["cpu-x86-64-v4", "cpu-x86-64-v3", "h100"])
def test_every_cell_is_what_the_target_lowers(target: str) -> None:
    made = make_target(target, LIMITS)
    for format in FORMATS:
        for dim in HEAD_DIMS:
            for gqa in GQA:
                for window in WINDOWS:
                    graph = attention(format, dim, gqa, window)
                    lowered = made.lower(graph["y"], graph)
                    why = refused(target, format, dim)
                    assert isinstance(lowered, Declined) is bool(why), (format, dim, gqa, window, lowered, why)


def test_a_refusal_names_the_layer_and_the_format() -> None:
    kv = KvGeometry("bf16@2=int8", 32, 4, 2, 96)
    assert refused_geometry("h100", kv) == "layer 0: bf16 at head_dim 96: Triton's blocks are powers of two"
    assert refused_geometry("cpu-x86-64-v4", kv) == refused_geometry("h100", KvGeometry("bf16@2=int8", 32, 4, 2, 64)) == ""


def test_targets_prints_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets", "--kv"]) == 0
    out = capsys.readouterr().out
    for name in FORMATS:
        assert f"cpu    {name:12}" in out
    assert "no 1: " in out


def test_a_no_cell_does_not_compile(tmp_path: Path) -> None:
    from mlsdc.compiler.config import parse_config
    from mlsdc.compiler.driver import check_support
    from mlsdc.compiler.errors import ConfigError
    from mlsdc.compiler.module import LevelModule, Module

    module = Module("m", (LevelModule("target", "model", kv=KvGeometry("int8", 32, 4, 2, 96)),))
    config = parse_config({"target": {"model": "m", "kv": "int8"}})
    with pytest.raises(ConfigError, match="config: target.kv: h100 cannot run layer 0: int8 at head_dim 96: Triton's blocks"):
        check_support(config, module, [make_target("h100", LIMITS)])
    check_support(config, module, [make_target("cpu-x86-64-v4", LIMITS)])
