"""raise-norm: RMSNorm in the ways it is written, and nothing else."""

from __future__ import annotations

import pytest

from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.ops_core import Binary, Reduce, Scalar, Unary
from mlsdc.compiler.ops_nn import RmsNorm
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.passes.raise_norm import RaiseNorm
from tests.passes.captured import assert_close, before, check_golden

ROWS = TensorType(DType.F32, (Dim("rows", 1, 8), 64))


def norm(*, square: str = "pow", divide: bool = False, offset: float = 0.0, axis: int = -1, of: str = "x") -> Graph:
    b = Builder("norm")
    x, other = b.input("x", ROWS), b.input("other", ROWS)
    weight = b.weight("w", TensorType(DType.F32, (64,)))
    squared = b.add("s", Scalar("pow", 2.0), {"x": x, "other": other}[of]) if square == "pow" else b.add("s", Binary("mul"), x, x)
    shifted = b.add("e", Scalar("add", 1e-5), b.add("m", Reduce("mean", axis), squared))
    root = b.add("r", Unary("sqrt" if divide else "rsqrt"), shifted)
    scaled = b.add("n", Binary("div" if divide else "mul"), x, root)
    return b.build(y=b.add("y", Binary("mul"), scaled, b.add("w1", Scalar("add", offset), weight) if offset else weight))


def test_golden() -> None:
    graph, pass_ = before("raise-norm")
    check_golden("raise-norm", pass_.rewrite(graph))


def test_computes_the_same() -> None:
    graph, pass_ = before("raise-norm")
    assert_close(pass_.rewrite(graph), graph)


@pytest.mark.parametrize("graph", [norm(), norm(square="mul"), norm(divide=True)])
def test_ways_to_write_it(graph: Graph) -> None:
    assert RaiseNorm().rewrite(graph)["y"].op == RmsNorm(1e-5)


def test_a_weight_plus_one_is_an_offset() -> None:
    raised = RaiseNorm().rewrite(norm(offset=1.0))
    assert raised["y"].op == RmsNorm(1e-5, offset=1.0)
    assert raised["y"].inputs == ("x", "w")


@pytest.mark.parametrize("graph", [norm(axis=0), norm(of="other")])
def test_leaves_other_means_alone(graph: Graph) -> None:
    assert RaiseNorm().rewrite(graph) is graph
