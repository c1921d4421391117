"""Linears over tensor maps, against the same linears over pointers, bit for bit: `python -m tests.targets.interpret_tma`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mlsdc.compiler.graph import Builder, Graph, Weight
from mlsdc.compiler.ops_nn import Gated, Linear
from mlsdc.compiler.ops_quant import GatedQuantise, LinearQ, Quantise
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.runtime.step import Header, Limits, StepBuffers
from tests.targets.interpret_ops import QUANTISE
from tests.targets.test_cpu_moe import random_weight
from tests.targets.triton_machine import TritonMachine

LIMITS = Limits(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=160, max_logit_rows=24, max_tree_nodes=7)
ROWS = Dim("rows", 1, 160)


def linear(dtype: DType, n: int, k: int, bias: bool = False, residual: bool = False, fine: tuple[int, ...] = ()) -> Graph:
    b = Builder(f"{dtype.value}_{n}_{k}_{bias}_{residual}_{len(fine)}")
    x, weight = b.input("x", TensorType(DType.F32, (ROWS, k))), b.weight("w", TensorType(dtype, (n, k)))
    more = (b.weight("b", TensorType(DType.F32, (n,))),) if bias else ()
    if dtype is DType.BF16:
        return b.build(result=b.add("result", Linear(), x, weight, *more))
    more += (b.input("r", TensorType(DType.F32, (ROWS, n))),) if residual else ()
    return b.build(result=b.add("result", LinearQ(bias, residual), b.add("h", Quantise(fine), x), weight, *more))


def gated(dtype: DType, n: int, k: int) -> Graph:
    b = Builder(f"gated_{dtype.value}_{n}_{k}")
    x, weight = b.input("x", TensorType(DType.F32, (ROWS, k))), b.weight("w", TensorType(dtype, (2 * n, k)))
    if dtype is DType.BF16:
        return b.build(result=b.add("result", Gated("gelu_tanh"), x, weight))
    return b.build(result=b.add("result", GatedQuantise(), b.add("h", Quantise(), x), weight))


GRAPHS = (
    gated(DType.Q8, 96, 64),
    gated(DType.BF16, 80, 96),  # the last tile of gate's rows reaches into up's
    linear(DType.Q8, 150, 96, bias=True, residual=True),  # ends within a tile, and within a block of 16 rows
    linear(DType.Q8, 256, 64, fine=(1,)),
    linear(DType.BF16, 150, 96, bias=True),  # k ends within a tile
    linear(DType.BF16, 128, 128),
)


def values(graph: Graph) -> dict[str, Any]:
    random = np.random.default_rng(3)
    given: dict[str, Any] = {}
    for node in graph:
        if isinstance(node.op, Weight):
            assert isinstance(node.type, TensorType)
            plain = random_weight(node).numpy()
            given[node.name] = QUANTISE[node.type.dtype](plain) if node.type.dtype in QUANTISE else plain
        elif node.name in ("x", "r"):
            assert isinstance(node.type, TensorType)
            given[node.name] = random.standard_normal((160, node.type.shape[1])).astype(np.float32)
    return given


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    with tempfile.TemporaryDirectory() as folder:
        for graph in GRAPHS:
            plain, mapped = (TritonMachine(LIMITS, Path(folder), exact=False) for _ in range(2))
            assert mapped.target.choose_linear("tma") is None
            templates = [call.spec.template for call in mapped.target.lower(graph["result"], graph).calls]  # type: ignore[union-attr]
            assert templates[-1].endswith("_tma"), templates
            for rows in (130, 160):
                buffers = StepBuffers(LIMITS, 16)
                buffers.header[Header.ROWS] = rows
                wanted, found = (m.run(graph, values(graph), buffers)["result"] for m in (plain, mapped))
                assert (wanted != 0xFF).any(), graph.name
                assert np.array_equal(found, wanted), (graph.name, rows)  # bytes of rows beyond are those that memory began with
    print("all as over pointers")


if __name__ == "__main__":
    main()
