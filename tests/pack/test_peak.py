"""Weights are packed one at a time: what that takes is bounded by the largest tensor, however many there are."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from mlsdc.compiler.capture import load_source
from mlsdc.compiler.driver import pack_weights
from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.module import LevelModule
from mlsdc.compiler.ops_core import Unary
from mlsdc.compiler.peak import shape_of, tensors_of, write_model
from mlsdc.compiler.progress import Silent
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.runtime.step import Limits
from mlsdc.targets.cpu import cpu_target

LIMITS = Limits(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=8, max_logit_rows=8, max_tree_nodes=7)
FIXED = 8 << 20  # headers, names, and the temporaries of the 4096 rows that are quantised at a time: here a whole tensor


@pytest.mark.parametrize("dtype", [DType.Q8, DType.Q4, DType.F32])
def test_packing_takes_at_most_three_times_the_largest_tensor(dtype: DType, tmp_path: Path) -> None:
    config = shape_of(0.03)
    largest, _ = write_model(tmp_path, config)
    graph = weights_only(dtype, tensors_of(config))
    source = load_source(str(tmp_path)).weights
    level = LevelModule("target", "model", {}, {"forward": graph})
    target = cpu_target("cpu-x86-64-v4", LIMITS)
    tracemalloc.start()
    try:
        pack_weights(tmp_path / "out", level, target, source, Silent())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(graph.weights()) > 80
    assert peak <= 3 * largest + FIXED


def weights_only(dtype: DType, shapes: dict[str, tuple[int, ...]]) -> Graph:
    b = Builder("weights")
    x = b.input("x", TensorType(DType.F32, (Dim("rows", 1, 8), 1)))
    for name, shape in shapes.items():
        if len(shape) == 2:
            b.weight(f"w.{name}", TensorType(dtype, shape), name)
    return b.build(y=b.add("y", Unary("neg"), x))
