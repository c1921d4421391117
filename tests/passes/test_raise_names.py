"""raise-names: names say what a value does in a decoder; only names change."""

from __future__ import annotations

from mlsdc.compiler.graph import Weight
from mlsdc.passes.raise_names import RaiseNames
from tests.passes.captured import before, check_golden, logits
from tests.passes.graphs import Llama, row_program


def test_golden() -> None:
    graph, pass_ = before("raise-names")
    check_golden("raise-names", pass_.rewrite(graph))


def test_computes_the_same() -> None:
    graph, pass_ = before("raise-names")
    assert (logits(pass_.rewrite(graph)) == logits(graph)).all()


def test_only_names_change() -> None:
    graph, pass_ = before("raise-names")
    after = pass_.rewrite(graph)
    assert [(node.op, node.type, node.origin) for node in after] == [(node.op, node.type, node.origin) for node in graph]


def test_a_captured_llama_is_the_row_program_that_later_passes_expect() -> None:
    graph, pass_ = before("raise-names")
    wanted = row_program(Llama(heads=4, head_dim=16, layers=1))
    after = pass_.rewrite(graph)
    assert {node.name: (node.op.opname, node.inputs) for node in after} == {node.name: (node.op.opname, node.inputs) for node in wanted}


def test_a_tied_weight_is_named_after_its_first_reader() -> None:
    graph, pass_ = before("raise-names")
    after = pass_.rewrite(graph)
    assert after["embed"].inputs[1] == after["lm_head"].inputs[1] == "w.embed"


def test_weights_keep_the_checkpoints_names_as_sources() -> None:
    graph, pass_ = before("raise-names")
    assert pass_.rewrite(graph)["w.layers.0.attn.q"].op == Weight(("model.layers.0.self_attn.q_proj.weight",))


def test_leaves_named_graphs_as_they_are() -> None:
    graph, pass_ = before("raise-names")
    once = pass_.rewrite(graph)
    assert pass_.rewrite(once) == once


def test_leaves_a_graph_without_attention_alone() -> None:
    graph, _ = before("raise-norm")
    assert RaiseNames().rewrite(graph) is graph
