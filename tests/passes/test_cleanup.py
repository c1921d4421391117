"""fold-constants, eliminate-common, eliminate-dead: golden text, numbers, and what each leaves alone."""

from __future__ import annotations

import pytest

from mlsdc.compiler.graph import Graph
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.observers import ValidateObserver
from mlsdc.compiler.pipeline import GraphPass, run_pipeline
from mlsdc.compiler.text import parse_graph
from mlsdc.passes.eliminate_common import EliminateCommon
from mlsdc.passes.eliminate_dead import EliminateDead
from mlsdc.passes.fold_constants import FoldConstants

X = "graph g\ndims rows in 1..8\n%x = input() : f32[rows, 4, 8]\n%w = input() : f32[4, 8]\n"


def graph(*lines: str) -> Graph:
    return parse_graph(X + "\n".join(lines))


def check(pass_: GraphPass, before: Graph, after: Graph) -> None:
    """The pass gives exactly `after`, and both compute the same."""
    module = Module("m", (LevelModule("target", "model", {}, {"forward": before}),))
    assert run_pipeline(module, [pass_], [ValidateObserver()]).target.graphs["forward"] == after


def test_fold_golden() -> None:
    before = graph(
        '%a = scalar(%x, fn="mul", value=1.0)',
        "%b = reshape(%a, shape=[-1, 32])",
        "%c = reshape(%b, shape=[-1, 8, 4])",
        '%d = scalar(%c, fn="mul", value=2.0)',
        '%e = scalar(%d, fn="mul", value=3.0)',
        "%f = transpose(%e, a=1, b=2)",
        "%g = transpose(%f, a=-1, b=1)",
        "%h = cast(%g, dtype=f32)",
        "return y=%h",
    )
    check(FoldConstants(), before, graph("%c = reshape(%x, shape=[-1, 8, 4])", '%e = scalar(%c, fn="mul", value=6.0)', "return y=%e"))


@pytest.mark.parametrize(
    "line",
    [
        "transpose(%x, a=1, b=1)",
        "slice(%x, axis=1, start=0, end=4)",
        "cat(%x, axis=1)",
        "expand(%x, shape=[-1, 4, 8])",
        "reshape(%x, shape=[-1, 4, 8])",
        "cast(%x, dtype=f32)",
        'scalar(%x, fn="div", value=1.0)',
        'scalar(%x, fn="pow", value=1.0)',
    ],
)
def test_an_op_that_does_nothing_goes(line: str) -> None:
    negated = graph('%z = unary(%x, fn="neg")', "return z=%z")
    check(FoldConstants(), graph(f"%y = {line}", '%z = unary(%y, fn="neg")', "return z=%z"), negated)


@pytest.mark.parametrize(
    "lines",
    [
        ("%a = cast(%x, dtype=bf16)", "%y = cast(%a, dtype=f32)", "return y=%y"),
        ('%a = scalar(%x, fn="mul", value=2.0)', '%y = scalar(%a, fn="add", value=3.0)', "return y=%y"),
        ('%a = scalar(%x, fn="mul", value=2.0)', '%y = scalar(%a, fn="mul", value=3.0)', "return a=%a, y=%y"),
        ('%y = scalar(%x, fn="add", value=0.0)', "return y=%y"),
        ('%a = scalar(%x, fn="pow", value=2.0)', '%y = scalar(%a, fn="pow", value=3.0)', "return y=%y"),
        ("%a = transpose(%x, a=1, b=2)", "%y = transpose(%a, a=0, b=1)", "return y=%y"),
        ("%y = slice(%x, axis=1, start=0, end=3)", "return y=%y"),
        ("%y = expand(%w, shape=[2, 4, 8])", "return y=%y"),
    ],
)
def test_fold_leaves_alone_what_does_something(lines: tuple[str, ...]) -> None:
    before = graph(*lines)
    assert FoldConstants().rewrite(before) is before


def test_common_golden() -> None:
    before = graph(
        '%a = unary(%x, fn="cos")',
        '%b = unary(%x, fn="cos")',
        '%c = unary(%a, fn="neg")',
        '%d = unary(%b, fn="neg")',
        '%e = binary(%c, %d, fn="mul")',
        "return e=%e, d=%d",
    )
    after = graph('%a = unary(%x, fn="cos")', '%c = unary(%a, fn="neg")', '%e = binary(%c, %c, fn="mul")', "return e=%e, d=%c")
    check(EliminateCommon(), before, after)


def test_weights_of_one_tensor_become_one_node() -> None:
    first, second = (f'%{name} = weight(sources=["embed"]) : f32[16, 8]' for name in "tu")
    rest = ("%a = linear(%x, %t)", '%n = unary(%x, fn="neg")')
    before = graph(first, second, *rest, "%b = linear(%n, %u)", "return a=%a, b=%b")
    after = graph(first, *rest, "%b = linear(%n, %t)", "return a=%a, b=%b")
    check(EliminateCommon(), before, after)


@pytest.mark.parametrize(
    "lines",
    [
        ('%a = unary(%x, fn="cos")', '%b = unary(%x, fn="sin")', "return a=%a, b=%b"),
        ('%a = binary(%x, %w, fn="sub")', '%b = binary(%w, %x, fn="sub")', "return a=%a, b=%b"),
        ("%v = input() : f32[4, 8]", '%a = binary(%v, %w, fn="sub")', "return a=%a"),
        ('%t = weight(sources=["a"]) : f32[8]', '%u = weight(sources=["b"]) : f32[8]', "return t=%t, u=%u"),
    ],
)
def test_common_leaves_alone_what_differs(lines: tuple[str, ...]) -> None:
    before = graph(*lines)
    assert EliminateCommon().rewrite(before) is before


def test_dead_golden() -> None:
    before = graph('%a = unary(%x, fn="exp")', '%b = unary(%x, fn="cos")', '%c = unary(%b, fn="neg")', "return y=%a")
    check(EliminateDead(), before, graph('%a = unary(%x, fn="exp")', "return y=%a"))


def test_dead_leaves_inputs_and_outputs_alone() -> None:
    before = graph('%a = unary(%x, fn="exp")', "return y=%a")
    assert EliminateDead().rewrite(before) is before
    assert "w" in before.by_name
