"""Graph algorithms, all networkx's: order, liveness, convexity of a fusion, critical path, DOT."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from mlsdc.compiler.graph import Graph, Input, Node, Weight

DiGraph: TypeAlias = Any  # networkx.DiGraph; networkx is untyped and belongs to the [compile] extra


def to_networkx(graph: Graph) -> DiGraph:
    """A `networkx.DiGraph` of value names, edges from a value to its users; each node carries its `Node` under `node`."""
    import networkx

    result = networkx.DiGraph(name=graph.name)
    for node in graph:
        result.add_node(node.name, node=node)
        result.add_edges_from((name, node.name) for name in node.inputs)
    return result


def topological_order(graph: Graph) -> list[str]:
    """Names in topological order; the graph's own order breaks ties, so a sorted graph comes back as it is."""
    import networkx

    position = {node.name: i for i, node in enumerate(graph)}
    return list(networkx.lexicographical_topological_sort(to_networkx(graph), key=position.__getitem__))


@dataclass(frozen=True)
class Lifetime:
    """Node indices between which a value must be kept: `first` makes it, `last` is its last use."""

    first: int
    last: int


def liveness(graph: Graph) -> dict[str, Lifetime]:
    """Lifetime of every value; outputs live to the end (index len(graph)), a value that nobody uses dies where it is made."""
    last = {node.name: i for i, node in enumerate(graph)}
    first = dict(last)
    for i, node in enumerate(graph):
        for name in node.inputs:
            last[name] = i
    for _, name in graph.outputs:
        last[name] = len(graph)
    return {name: Lifetime(first[name], last[name]) for name in first}


def is_convex(graph: Graph, names: Iterable[str]) -> bool:
    """Whether the nodes can become one node: no path leaves the set and comes back (which would make a cycle)."""
    import networkx

    inside = set(names)
    whole = to_networkx(graph)
    reached: set[str] = set()  # outside, downstream of the set
    for name in inside:
        reached.update(d for d in networkx.descendants(whole, name) if d not in inside)
    return not any(user in inside for name in reached for user in whole.successors(name))


def critical_path(graph: Graph, cost: Callable[[Node], float]) -> tuple[float, list[str]]:
    """(cost, names) of the most expensive path through the graph; inputs and weights cost nothing. (0, []) for an empty graph."""
    best: dict[str, tuple[float, str | None]] = {}
    for name in topological_order(graph):
        node = graph[name]
        own = 0.0 if isinstance(node.op, Input | Weight) else cost(node)
        before = max(((best[value][0], value) for value in dict.fromkeys(node.inputs)), default=(0.0, None), key=lambda pair: pair[0])
        best[name] = (before[0] + own, before[1])
    if not best:
        return 0.0, []
    end: str | None = max(best, key=lambda name: best[name][0])
    total, path = best[end][0], list[str]()  # type: ignore[index]
    while end is not None:
        path.append(end)
        end = best[end][1]
    return total, path[::-1]


def to_dot(graph: Graph) -> str:
    """Graphviz source: one box a node, weights grey, inputs round, results double."""
    lines = [f"digraph {quote(graph.name)} {{", "  rankdir=TB; node [shape=box, fontname=monospace];"]
    for node in graph:
        style = {Input: ", shape=ellipse", Weight: ", style=filled, fillcolor=lightgrey"}.get(type(node.op), "")
        label = quote(node.name + "\\n" + f"{node.op.opname} : {node.type}")
        lines.append(f"  {quote(node.name)} [label={label}{style}];")
        lines += [f"  {quote(name)} -> {quote(node.name)};" for name in dict.fromkeys(node.inputs)]
    for result, name in graph.outputs:
        lines += [f"  {quote('return ' + result)} [shape=doubleoctagon];", f"  {quote(name)} -> {quote('return ' + result)};"]
    return "\n".join([*lines, "}"]) + "\n"


def quote(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'
