"""Order, liveness, convexity, critical path, DOT."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlsdc.compiler.analysis import Lifetime, critical_path, is_convex, liveness, to_dot, to_networkx, topological_order
from mlsdc.compiler.graph import Graph
from mlsdc.compiler.text import parse_graph
from tests.compiler.graphs import graphs

DIAMOND = parse_graph(
    "graph g\n%x = input() : f32[4]\n"
    '%a = unary(%x, fn="exp")\n%b = unary(%a, fn="neg")\n%c = unary(%a, fn="cos")\n%d = binary(%b, %c, fn="add")\nreturn y=%d')


@given(graphs())
def test_a_graph_is_in_its_own_topological_order(graph: Graph) -> None:
    assert topological_order(graph) == [node.name for node in graph]


@given(graphs())
def test_a_value_lives_from_its_definition_to_its_last_use(graph: Graph) -> None:
    outputs = {name for _, name in graph.outputs}
    for i, node in enumerate(graph):
        uses = [j for j, other in enumerate(graph) if node.name in other.inputs]
        assert liveness(graph)[node.name] == Lifetime(i, len(graph) if node.name in outputs else max(uses, default=i))


def test_a_set_that_a_path_leaves_and_enters_again_is_not_convex() -> None:
    assert not is_convex(DIAMOND, {"a", "b", "d"})
    assert not is_convex(DIAMOND, {"a", "d"})
    assert is_convex(DIAMOND, {"a", "b", "c", "d"})
    assert is_convex(DIAMOND, {"b", "c"})


@given(graphs(), st.data())
def test_what_lies_between_two_places_of_the_order_is_convex(graph: Graph, data: st.DataObject) -> None:
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(graph))] * 2)))
    assert is_convex(graph, [node.name for node in graph.nodes[first:last]])


def test_the_critical_path_is_the_most_expensive() -> None:
    assert critical_path(DIAMOND, lambda node: 5.0 if node.name == "c" else 1.0) == (7.0, ["x", "a", "c", "d"])
    assert critical_path(Graph("empty", (), ()), lambda node: 1.0) == (0.0, [])


def test_networkx_has_every_node_and_use() -> None:
    assert sorted(to_networkx(DIAMOND).edges) == [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("x", "a")]
    assert to_networkx(DIAMOND).nodes["b"]["node"] is DIAMOND["b"]


def test_dot_has_one_box_a_node_and_one_arrow_a_use() -> None:
    dot = to_dot(DIAMOND)
    assert dot.count("[label=") == len(DIAMOND)
    assert '  "c" -> "d";' in dot
    assert '  "d" -> "return y";' in dot
