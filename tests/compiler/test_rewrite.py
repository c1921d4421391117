"""Rules run to a fixpoint, and what they did is recorded."""

from __future__ import annotations

import pytest

from mlsdc.compiler.errors import IrError
from mlsdc.compiler.graph import Editor, Node
from mlsdc.compiler.ops_core import Unary
from mlsdc.compiler.rewrite import Fired, Rule, apply_rules, start_recording, stop_recording
from mlsdc.compiler.text import parse_graph

NEGATIONS = parse_graph("graph g\n%x = input() : f32[4]\n" + "".join(
    f'%{name} = unary(%{of}, fn="neg")\n' for name, of in zip("abcd", "xabc", strict=True)) + "return y=%d")


def cancel(editor: Editor, node: Node) -> bool | None:
    inner = editor.producer(node, 0, Unary)
    if inner is None or (node.op, inner.op) != (Unary("neg"), Unary("neg")):
        return None
    editor.redirect(node.name, inner.inputs[0])
    return True


CANCEL = Rule("-(-x) => x", Unary, cancel)


def test_rules_run_until_none_fires() -> None:
    graph, fired = apply_rules(NEGATIONS, [CANCEL])
    assert [node.name for node in graph] == ["x"]
    assert graph.outputs == (("y", "x"),)
    assert {firing.equation for firing in fired} == {"-(-x) => x"}


def test_a_graph_without_a_match_is_the_same_object() -> None:
    graph, _ = apply_rules(NEGATIONS, [CANCEL])
    again, fired = apply_rules(graph, [CANCEL])
    assert again is graph
    assert not fired


def test_a_dead_node_does_not_fire() -> None:
    dead = parse_graph('graph g\n%x = input() : f32[4]\n%a = unary(%x, fn="neg")\n%b = unary(%a, fn="neg")\nreturn y=%a')
    assert apply_rules(dead, [CANCEL]) == (dead, [])


def test_a_recording_sees_what_fired_and_what_declined() -> None:
    outer, inner = start_recording(), start_recording()
    apply_rules(NEGATIONS, [CANCEL])
    stop_recording(inner)
    apply_rules(NEGATIONS, [Rule("never", Unary, lambda editor, node: None)])
    stop_recording(outer)
    apply_rules(NEGATIONS, [CANCEL])
    assert inner.fired[0] == Fired("-(-x) => x", "g", "b")
    assert outer.fired == inner.fired
    assert "never" not in inner.declined
    assert outer.declined["never"] == 4
    assert outer.counts() == {"-(-x) => x": len(inner.fired)}


def test_rules_that_never_settle_are_an_error() -> None:
    def flip(editor: Editor, node: Node) -> bool:
        editor.replace(node.name, Unary("cos" if node.op == Unary("sin") else "sin"), *node.inputs)
        return True

    with pytest.raises(IrError, match="rules do not settle in 100 rounds; last fired 'flip' at %d"):
        apply_rules(NEGATIONS, [Rule("flip", Unary, flip)])
