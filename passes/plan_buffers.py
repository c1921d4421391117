"""Places in the arena: liveness of every value and scratch buffer, then first fit at the lowest offset that is free all the while."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlsdc.compiler.graph import Graph
from mlsdc.passes.select_kernels import Selected

ALIGNMENT = 64


@dataclass(frozen=True)
class Placement:
    """Arena offsets. `values` has every value with storage of its own or of the value it aliases; `temps` is keyed by (node, temp), node ""
    for the prologue's, which live as long as the program. `roots` says of a view whose storage it shows, an input's or a weight's too."""

    values: dict[str, int]
    temps: dict[tuple[str, str], int]
    arena_bytes: int
    roots: dict[str, str]


@dataclass
class Interval:
    """A buffer needed from step `start` to step `end`, both included."""

    bytes: int
    start: int
    end: int
    offset: int = field(default=-1)


def plan_buffers(graph: Graph, selected: Selected) -> Placement:
    """The arena of a program; `choices` has no place in it, it is written to the step's buffer."""
    step = {node.name: i for i, (node, _) in enumerate(selected.nodes, 1)}
    last = len(selected.nodes) + 1
    kept = {value for result, value in graph.outputs if result != "choices"}
    root: dict[str, str] = {}
    buffers: dict[str, Interval] = {}
    uses: dict[str, int] = {}
    for node, lowering in selected.nodes:  # last use of every root, through aliases
        root[node.name] = root.get(lowering.alias_of, lowering.alias_of) if lowering.alias_of else node.name
        for value in node.inputs:
            uses[root.get(value, value)] = step[node.name]
    for value in kept:
        uses[root.get(value, value)] = last
    temps: dict[tuple[str, str], Interval] = {}
    for lowering in selected.prologue:
        temps |= {("", name): Interval(size, 0, last) for name, size in lowering.temps.items()}
    direct = {root.get(value, value) for result, value in graph.outputs if result == "choices"}
    for node, lowering in selected.nodes:
        now = step[node.name]
        temps |= {(node.name, name): Interval(size, now, now) for name, size in lowering.temps.items()}
        if lowering.result_bytes == 0 or node.name in direct:
            continue
        end = max(uses.get(node.name, now), now)
        source = root.get(lowering.in_place_of, "") if lowering.in_place_of else ""
        if source in buffers and uses[source] == now and buffers[source].bytes >= lowering.result_bytes:
            buffers[node.name] = buffers[source]
            buffers[node.name].end = end
            uses[source] = end  # the buffer goes on living under its new name
        else:
            buffers[node.name] = Interval(lowering.result_bytes, now, end)
    unique = list({id(i): i for i in (*temps.values(), *buffers.values())}.values())
    arena = first_fit(unique)
    values = {name: interval.offset for name, interval in buffers.items()}
    values |= {name: values[of] for name, of in root.items() if of in values}
    return Placement(values, {key: interval.offset for key, interval in temps.items()}, arena, root)


def first_fit(intervals: list[Interval]) -> int:
    """Give every interval an offset; returns the arena's size. Larger buffers first, so that small ones fill the gaps."""
    placed: list[Interval] = []
    for interval in sorted(intervals, key=lambda i: (-i.bytes, i.start, i.end)):
        offset = 0
        for other in sorted((o for o in placed if o.start <= interval.end and interval.start <= o.end), key=lambda o: o.offset):
            if offset + interval.bytes <= other.offset:
                break
            offset = max(offset, aligned(other.offset + other.bytes))
        interval.offset = offset
        placed.append(interval)
    return max((aligned(i.offset + i.bytes) for i in placed), default=0)


def aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
