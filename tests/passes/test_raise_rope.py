"""raise-rope: both ways to write a rotation, one table for all of them."""

from __future__ import annotations

import pytest

from mlsdc.compiler.graph import Builder, Editor, Graph
from mlsdc.compiler.ops_capture import Positions
from mlsdc.compiler.ops_core import Binary, Cast, Cat, Reshape, Scalar, Slice, Unary
from mlsdc.compiler.ops_nn import Rope, RopeTable
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.passes.raise_rope import RaiseRope
from tests.passes.captured import assert_close, before, check_golden

SEQ = Dim("seq", 1, 64)


def rotation(*, halves: bool = False, scaling: float = 1.0, sign: str = "neg", seq_first: bool = False) -> Graph:
    """x [1, 2, seq, 8] (or [1, seq, 2, 8]) rotated."""
    b = Builder("rope")
    tokens = b.input("tokens", TensorType(DType.I32, (1, SEQ)))
    x = b.input("x", TensorType(DType.F32, (1, SEQ, 2, 8) if seq_first else (1, 2, SEQ, 8)))
    position = b.add("p", Cast(DType.F32), b.add("positions", Positions(), tokens))
    angle = b.add("f", Binary("mul"), b.add("p1", Reshape((-1, 1)), position), b.weight("inv_freq", TensorType(DType.F32, (4,))))
    table = angle if halves else b.add("e", Cat(), angle, angle)
    wide = (1, -1, 1, 4 if halves else 8) if seq_first else (1, 1, -1, 4 if halves else 8)
    scaled = {fn: b.add(f"{fn}_scaled", Scalar("mul", scaling), b.add(fn, Unary(fn), table)) for fn in ("cos", "sin")}
    cos, sin = (b.add(f"{fn}_wide", Reshape(wide), value) for fn, value in scaled.items())
    lo, hi = b.add("lo", Slice(3, 0, 4), x), b.add("hi", Slice(3, 4, 8), x)
    if halves:
        low = b.add("low", Binary("sub"), b.add("a", Binary("mul"), lo, cos), b.add("b", Binary("mul"), hi, sin))
        high = b.add("high", Binary("add"), b.add("c", Binary("mul"), hi, cos), b.add("d", Binary("mul"), lo, sin))
        return b.build(y=b.add("y", Cat(3), low, high))
    turned = b.add("turned", Cat(3), b.add("sign", Unary(sign), hi), lo)
    return b.build(y=b.add("y", Binary("add"), b.add("a", Binary("mul"), x, cos), b.add("b", Binary("mul"), sin, turned)))


def test_golden() -> None:
    graph, pass_ = before("raise-rope")
    check_golden("raise-rope", pass_.rewrite(graph))


def test_computes_the_same() -> None:
    graph, pass_ = before("raise-rope")
    assert_close(pass_.rewrite(graph), graph)


def test_all_layers_share_one_table() -> None:
    graph, pass_ = before("raise-rope")
    raised = pass_.rewrite(graph)
    assert [node.name for node in raised if isinstance(node.op, RopeTable)] == ["rope_table"]
    assert sum(isinstance(node.op, Rope) for node in raised) == 2


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("seq_first", [False, True])
def test_ways_to_write_it(halves: bool, seq_first: bool) -> None:
    raised = RaiseRope().rewrite(rotation(halves=halves, seq_first=seq_first))
    assert raised["y.rope"].op == Rope()
    assert raised["y"].type == raised["x"].type


def test_a_factor_on_cos_and_sin_goes_into_the_table() -> None:
    assert RaiseRope().rewrite(rotation(scaling=1.2))["rope_table"].op == RopeTable(1.2)


def test_leaves_what_is_not_a_rotation_alone() -> None:
    graph = rotation(sign="abs")
    assert RaiseRope().rewrite(graph) is graph


def test_leaves_different_factors_on_cos_and_sin_alone() -> None:
    editor = Editor(rotation(scaling=1.2))
    editor.replace("sin_scaled", Scalar("mul", 1.1), "sin")
    graph = editor.finish()
    assert RaiseRope().rewrite(graph) is graph
