"""Rules: a pass as a set of equations, applied until none fires, with a record of what fired for observers.

    Rule("x * silu(g) -> gated(g, x)", ops_core.Binary, fuse_gated)

A rule's function gets the editor and a node of the rule's root op. It declines by returning None (or False) and leaving the graph as it
was; it returns True when it changed something. Each firing must make progress: two rules that undo each other never end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from mlsdc.compiler.errors import IrError
from mlsdc.compiler.graph import Editor, Graph, Node
from mlsdc.compiler.ops import Op

MAX_ROUNDS = 100  # rounds over the whole graph before rules that never settle are an error


@dataclass(frozen=True)
class Rule:
    """`equation` is the rule's name in dumps and in `explain.json`."""

    equation: str
    root: type[Op]
    function: Callable[[Editor, Node], bool | None]


@dataclass(frozen=True)
class Fired:
    """A rule changed the graph at node `node` of graph `graph`."""

    equation: str
    graph: str
    node: str


@dataclass(eq=False)
class Record:
    """What happened while a pass ran: the rules that fired, and how often each was tried and declined."""

    fired: list[Fired] = field(default_factory=list)
    declined: dict[str, int] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """Equation -> how often it fired, in order of first firing."""
        counts: dict[str, int] = {}
        for firing in self.fired:
            counts[firing.equation] = counts.get(firing.equation, 0) + 1
        return counts


_records: ContextVar[tuple[Record, ...]] = ContextVar("records", default=())


def start_recording() -> Record:
    """From now on, until `stop_recording`, what rules do goes into the record; recordings nest."""
    record = Record()
    _records.set((*_records.get(), record))
    return record


def stop_recording(record: Record) -> None:
    _records.set(tuple(other for other in _records.get() if other is not record))


def note(equation: str, graph: str, node: str) -> None:
    """Tell the recordings that a change was made; passes that are not written as rules call it themselves."""
    for record in _records.get():
        record.fired.append(Fired(equation, graph, node))


def apply_rules(graph: Graph, rules: Sequence[Rule]) -> tuple[Graph, list[Fired]]:
    """Apply the rules at every node, in order, again and again until none fires; then drop dead nodes and verify.

    Gives the same graph object back when nothing fired. Raises IrError when the rules do not settle.
    """
    editor, fired = Editor(graph), list[Fired]()
    declined = dict.fromkeys((rule.equation for rule in rules), 0)
    for _ in range(MAX_ROUNDS):
        before = len(fired)
        for name in tuple(editor.nodes):
            for rule in rules:
                node = editor.nodes.get(name)
                if node is None or not isinstance(node.op, rule.root) or is_dead(editor, name):
                    continue
                if rule.function(editor, node):
                    fired.append(Fired(rule.equation, graph.name, name))
                    note(rule.equation, graph.name, name)
                else:
                    declined[rule.equation] += 1
        if len(fired) == before:
            break
        editor = Editor(editor.finish())  # what a firing left dead must not match again
    else:
        last = fired[-1]
        raise IrError(f"graph '{graph.name}': rules do not settle in {MAX_ROUNDS} rounds; last fired '{last.equation}' at %{last.node}")
    for record in _records.get():
        for equation, count in declined.items():
            record.declined[equation] = record.declined.get(equation, 0) + count
    return (editor.finish() if fired else graph), fired


def is_dead(editor: Editor, name: str) -> bool:
    """Whether nothing uses the value any more: a rule has put another in its place."""
    return not editor.users(name) and not editor.is_output(name)
