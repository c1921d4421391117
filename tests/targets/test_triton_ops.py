"""Ops of drafting levels and of mixtures of experts on NVIDIA GPUs: Triton's interpreter against the reference, and what is declined."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.compiler.graph import Builder
from mlsdc.compiler.ops import Op
from mlsdc.compiler.ops_core import Reduce, Softmax
from mlsdc.compiler.ops_nn import Gated, Linear
from mlsdc.compiler.ops_quant import LinearF8, LinearQ
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.targets.nvidia import NvidiaTarget
from mlsdc.targets.protocol import Declined
from tests.targets.attention_vectors import LIMITS
from tests.targets.in_interpreter import interpreted
from tests.targets.interpret_attention import node_graph


def test_every_op_agrees_with_the_reference(root: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    assert "all as the reference interpreter has them" in interpreted(root, "interpret_ops")


def test_a_softmax_over_positions_is_declined() -> None:
    scores = TensorType(DType.F32, (Dim("rows", 1, 48), 2, Dim("ctx", 1, 256)))
    graph = node_graph(LIMITS, Softmax(), x=scores)
    declined = NvidiaTarget("h100", LIMITS).lower(graph["result"], graph)
    assert isinstance(declined, Declined)
    assert "attention is fused" in declined.why


def test_a_reduction_over_rows_is_declined() -> None:
    graph = node_graph(LIMITS, Reduce("sum", 0), x=(64,))
    declined = NvidiaTarget("h100", LIMITS).lower(graph["result"], graph)
    assert isinstance(declined, Declined)
    assert "over axis 0" in declined.why


@pytest.mark.parametrize(("op", "rows", "weight"), [
    (Linear(), DType.F32, DType.BF16), (Gated(), DType.F32, DType.F8), (LinearQ(), DType.A8, DType.Q8), (LinearF8(), DType.F32, DType.F8),
], ids=lambda value: getattr(value, "opname", ""))
def test_a_linear_whose_rows_hold_more_than_31_bits_count_is_declined(op: Op, rows: DType, weight: DType) -> None:
    """Few results of many columns: it is the rows that are too large, not the weight."""
    b, k = Builder("wide"), 2**21
    x = b.input("x", TensorType(rows, (Dim("rows", 1, 1024), k)))
    graph = b.build(y=b.add("y", op, x, b.weight("w", TensorType(weight, (32, k)))))
    declined = NvidiaTarget("h100", LIMITS).lower(graph["y"], graph)
    assert isinstance(declined, Declined)
    assert "31 bits" in declined.why
