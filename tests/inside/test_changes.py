"""What the viewer says a pass did to a graph."""

from __future__ import annotations

from mlsdc.compiler.text import parse_graph
from mlsdc.compiler.view.changes import GraphChanges, graph_changes

BEFORE = (
    'graph forward\n%x = input() : f32[4, 64]\n%w = weight(sources=["w"]) : f32[64]\n'
    '%norm = rms_norm(%x, %w, eps=1e-05)\n%q = quantise(%norm)\n%y = unary(%x, fn="silu")\nreturn q=%q, y=%y')


def changes(after: str) -> GraphChanges:
    return graph_changes(parse_graph(BEFORE), parse_graph(after))


def test_a_graph_is_no_change_of_itself() -> None:
    assert changes(BEFORE) == GraphChanges((), (), (), {}, {})


def test_a_fusion_is_the_heir_of_what_it_took_in() -> None:
    after = BEFORE.replace("%norm = rms_norm(%x, %w, eps=1e-05)\n", "").replace("quantise(%norm)", "norm_quantise(%x, %w, eps=1e-05)")
    assert changes(after) == GraphChanges((), ("q",), ("norm",), {}, {"q": ("norm",)})


def test_another_name_is_no_other_node() -> None:
    assert changes(BEFORE.replace("%norm", "%final_norm")) == GraphChanges((), (), (), {"final_norm": "norm"}, {})


def test_a_dead_node_has_no_heir() -> None:
    after = BEFORE.replace('%y = unary(%x, fn="silu")\n', "").replace(", y=%y", "")
    assert changes(after) == GraphChanges((), (), ("y",), {}, {})


def test_an_added_node_is_added_and_its_user_changed() -> None:
    after = BEFORE.replace('%y = unary(%x, fn="silu")', '%z = unary(%x, fn="neg")\n%y = unary(%z, fn="silu")')
    assert changes(after) == GraphChanges(("z",), ("y",), (), {}, {})
