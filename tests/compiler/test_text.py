"""The text form: what is printed parses back to the same thing, and what does not parse says where and why."""

from __future__ import annotations

import pytest
from hypothesis import given

from mlsdc.compiler.errors import IrError
from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.ops_core import Scalar, Unary
from mlsdc.compiler.text import parse, parse_graph, parse_module, print_graph, print_module, print_node
from mlsdc.compiler.types import Dim, DType, TensorType
from tests.compiler.graphs import graphs, modules

X = "graph g\ndims rows in 1..8\n\n%x = input() : f32[rows, 32]\n"


@given(graphs())
def test_a_graph_parses_back_to_itself(graph: Graph) -> None:
    assert parse(print_graph(graph)) == graph


@given(modules())
def test_a_module_parses_back_to_itself(module: Module) -> None:
    assert parse(print_module(module)) == module


@given(graphs())
def test_a_parsed_graph_prints_as_the_same_text(graph: Graph) -> None:
    assert print_graph(parse_graph(print_graph(graph))) == print_graph(graph)


def test_a_graph_reads_like_this() -> None:
    builder = Builder("forward")
    x = builder.input("x", TensorType(DType.F32, (Dim("rows", 1, 8), 32)))
    y = builder.add("layers.0.act", Unary("silu"), x, origin="model.layers.0.mlp.act_fn")
    text = print_graph(builder.build(result=y))
    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "graph forward",
        "dims rows in 1..8",
        "",
        "%x = input() : f32[rows, 32]",
        '%layers.0.act = unary(%x, fn="silu") : f32[rows, 32] // model.layers.0.mlp.act_fn',
        "",
        "return result=%layers.0.act",
    ]


def test_renaming_one_node_changes_the_lines_that_name_it_only() -> None:
    def text(name: str) -> list[str]:
        builder = Builder("g")
        x = builder.input("x", TensorType(DType.F32, (4,)))
        return print_graph(builder.build(y=builder.add("y", Unary("neg"), x), z=builder.add(name, Unary("exp"), x))).splitlines()

    before, after = text("z"), text("a_long_name_that_is_wider_than_its_column_by_far")
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 2


def test_whole_line_comments_are_skipped() -> None:
    assert parse("// fuse-attention\n" + X + "  // nothing\nreturn y=%x\n") == parse(X + "return y=%x")


def test_a_type_that_the_op_infers_may_be_left_out() -> None:
    graph = parse_graph(X + '%y = unary(%x, fn="exp")\nreturn y=%y')
    assert graph["y"].type == graph["x"].type


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), 1e-45, 1e300, -0.0, 3.0])
def test_floats_come_back_exactly(value: float) -> None:
    builder = Builder("g")
    y = builder.add("y", Scalar("mul", value), builder.input("x", TensorType(DType.F32, ())))
    graph = builder.build(y=y)
    assert repr(parse_graph(print_graph(graph))["y"].op) == repr(graph["y"].op)


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("", "1:1", "expected 'graph' or 'module', found an empty text"),
        ("grph g", "1:1", "expected 'graph NAME' or 'module NAME'"),
        (X + "%y = rmsnorm(%x)\nreturn", "5:6", "'rmsnorm' is not an op; did you mean 'rms_norm'?"),
        (X + "%y = softmax(%z)\nreturn", "5:14", "%z is not defined above"),
        (X + "%x = softmax(%x)\nreturn", "5:1", "%x is defined twice"),
        (X + "%y = softmax(%x, axis=1)\nreturn", "5:18", "softmax has no attribute 'axis'"),
        (X + '%y = unary(%x, fun="exp")\nreturn', "5:16", "unary has no attribute 'fun'; did you mean 'fn'?"),
        (X + "%y = unary(%x)\nreturn", "5:6", "unary: attribute 'fn' is missing"),
        (X + "%y = unary(%x, fn=3)\nreturn", "5:16", "unary: attribute 'fn' expects a string"),
        (X + '%y = unary(%x, fn="sinus")\nreturn', "5:6", "unary fn 'sinus' is not one of"),
        (X + "%y = softmax(%x) : f32[rows, 33]\nreturn", "5:20", "the type is f32[rows, 33], but softmax gives f32[rows, 32]"),
        (X + "%y = softmax(%x) : f33[rows]\nreturn", "5:20", "'f33' is not a type"),
        (X + "%y = input() : f32[cols]\nreturn", "5:20", "dim 'cols' is not declared"),
        (X + "%y = input()\nreturn", "5:13", "expected ': type'"),
        (X + "%y = softmax(%x) extra\nreturn", "5:18", "expected the end of the line"),
        (X + "%y = softmax(%x\nreturn", "5:16", "expected ','"),
        (X + "return y=%y", "5:10", "%y is not defined above"),
        (X, "5:1", "expected '%name = op(...)' or 'return'"),
        (X + "return\nreturn", "6:1", "expected the end of the text"),
        ("graph g\ndims rows in 1..\nreturn", "2:17", "expected the highest size"),
        ("graph g\ndims f32 in 1..2\nreturn", "2:6", "'f32' cannot name a dim"),
        ("module m\nlevel a kind=model params=[1]", "2:27", "expected params as a JSON object"),
        ("module m\nlevel a kind=model params={1}", "2:28", "not a JSON value"),
        ("module m\nlevel a kind=model kv=kv<bf16, page=5, layers=1, heads=1, dim=16>", "2:23", "kv page_size: 5"),
        ("module m\nlevel a kind=model\nlevel a kind=model", "3:7", "level 'a' is defined twice"),
    ],
)
def test_an_error_has_line_column_and_caret(text: str, where: str, message: str) -> None:
    with pytest.raises(IrError) as error:
        parse(text, "a.ir")
    head, line, caret = str(error.value).split("\n")
    assert head.startswith(f"a.ir:{where}: {message}")
    number, column = map(int, where.split(":"))
    assert line == "  " + [*text.split("\n"), ""][number - 1]
    assert caret == " " * (column + 1) + "^"


def test_two_dims_of_one_name_cannot_be_printed() -> None:
    builder = Builder("g")
    for name, high in (("x", 8), ("y", 9)):
        builder.input(name, TensorType(DType.F32, (Dim("rows", 1, high),)))
    with pytest.raises(IrError, match=r"%y: dim 'rows' is 1..9 here and 1..8 before"):
        print_graph(builder.build())


def test_a_module_is_not_a_graph() -> None:
    with pytest.raises(IrError, match="holds a module, expected a graph"):
        parse_graph(print_module(Module("m", (LevelModule("a", "model"),))))
    with pytest.raises(IrError, match="holds a graph, expected a module"):
        parse_module(X + "return")


def test_one_node_is_one_line_whatever_its_origin() -> None:
    builder = Builder("g")
    x = builder.input("x", TensorType(DType.F32, (1,)))
    graph = builder.build(y=builder.add("y", Unary("neg"), x, origin=' two\nlines // "quoted"'))
    assert "\n" not in print_node(graph["y"])
    assert parse(print_graph(graph)) == graph
