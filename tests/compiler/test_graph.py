"""Graphs, the editor, and errors that name the node."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlsdc.compiler.errors import IrError
from mlsdc.compiler.graph import Builder, Editor, Graph, Input
from mlsdc.compiler.ops_core import Binary, Cast, Unary
from mlsdc.compiler.text import parse_graph
from mlsdc.compiler.types import DType, TensorType
from tests.compiler.graphs import graphs

F32 = TensorType(DType.F32, (4,))
GRAPH = parse_graph('graph g\n%x = input() : f32[4]\n%a = unary(%x, fn="exp")\n%b = unary(%a, fn="neg")\nreturn y=%b, a=%a')


def needed(graph: Graph) -> set[str]:
    """Names that an output needs, and all inputs."""
    pending = [name for _, name in graph.outputs] + [node.name for node in graph.inputs()]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending.extend(graph[name].inputs)
    return seen


@given(graphs())
def test_finish_keeps_what_is_needed_and_nothing_else(graph: Graph) -> None:
    finished = Editor(graph).finish()
    assert {node.name for node in finished} == needed(graph)
    assert all(finished[name] == graph[name] for name in needed(graph))
    assert finished.outputs == graph.outputs


@given(graphs())
def test_finish_of_a_finished_graph_changes_nothing(graph: Graph) -> None:
    finished = Editor(graph).finish()
    assert Editor(finished).finish() == finished


@given(graphs(), st.randoms(use_true_random=False))
def test_finish_sorts_nodes_added_in_any_order(graph: Graph, random: object) -> None:
    editor = Editor(Editor(graph).finish())
    names = list(editor.nodes)
    random.shuffle(names)  # type: ignore[attr-defined]
    editor.nodes = {name: editor.nodes[name] for name in names}
    editor.finish().verify()


@given(graphs(), st.data())
def test_renaming_there_and_back_changes_nothing(graph: Graph, data: st.DataObject) -> None:
    finished = Editor(graph).finish()
    name = data.draw(st.sampled_from([node.name for node in finished]))
    editor = Editor(finished)
    editor.rename(name, "another name!")
    assert name not in editor.finish().by_name
    editor.rename("another name!", name)
    back = editor.finish()
    assert back.by_name == finished.by_name
    assert back.outputs == finished.outputs


@given(graphs())
def test_users_are_the_nodes_that_have_the_value_as_input(graph: Graph) -> None:
    editor = Editor(graph)
    for node in graph:
        assert {user.name for user in editor.users(node.name)} == {other.name for other in graph if node.name in other.inputs}


def test_replace_keeps_name_origin_and_users() -> None:
    editor = Editor(replace(GRAPH, nodes=(*GRAPH.nodes[:1], replace(GRAPH["a"], origin="here"), GRAPH["b"])))
    editor.replace("a", Unary("cos"), "x")
    after = editor.finish()
    assert (after["a"].op, after["a"].origin, after["b"].inputs) == (Unary("cos"), "here", ("a",))


def test_redirect_moves_outputs_too() -> None:
    editor = Editor(GRAPH)
    editor.redirect("a", "x")
    after = editor.finish()
    assert after.outputs == (("y", "b"), ("a", "x"))
    assert "a" not in after.by_name


def test_retyping_an_input_retypes_what_follows() -> None:
    editor = Editor(GRAPH)
    editor.retype("x", TensorType(DType.F32, (7,)))
    assert editor.finish()["b"].type == TensorType(DType.F32, (7,))


def test_a_value_that_is_also_an_output_has_no_only_user() -> None:
    editor = Editor(GRAPH)
    assert editor.only_user("a") is None
    only = editor.only_user("x")
    assert only is not None
    assert only.name == "a"


def test_a_cycle_is_an_error_that_names_a_node() -> None:
    editor = Editor(GRAPH)
    editor.replace("a", Binary("add"), "x", "b")
    with pytest.raises(IrError, match="%[ab] depends on itself"):
        editor.finish()


@pytest.mark.parametrize(
    ("nodes", "outputs", "message"),
    [
        ((GRAPH["x"], GRAPH["x"]), (), "%x is defined twice"),
        ((GRAPH["a"], GRAPH["x"]), (), "%a uses %x before it is defined"),
        ((GRAPH["x"], replace(GRAPH["a"], type=TensorType(DType.F32, (5,)))), (), r"%a: has type f32\[5\], but unary gives f32\[4\]"),
        ((GRAPH["x"], replace(GRAPH["a"], op=Unary("sinus"))), (), "%a: unary fn 'sinus' is not one of"),
        ((GRAPH["x"], replace(GRAPH["a"], op=Input())), (), "%a: input takes no inputs, found 1"),
        ((GRAPH["x"],), (("y", "z"),), "output 'y' names %z, which is not defined"),
    ],
)
def test_verify_names_the_node(nodes: tuple[object, ...], outputs: tuple[tuple[str, str], ...], message: str) -> None:
    with pytest.raises(IrError, match=message):
        Graph("g", nodes, outputs).verify()  # type: ignore[arg-type]


def test_the_builder_refuses_a_value_that_does_not_exist() -> None:
    with pytest.raises(IrError, match="%y uses %x before it is defined"):
        Builder("g").add("y", Cast(DType.F16), "x")


def test_a_missing_value_is_named() -> None:
    with pytest.raises(IrError, match="graph 'g' has no value '%nothing'"):
        GRAPH["nothing"]
