"""fuse-attention: one node for the chain, and the reasons not to."""

from __future__ import annotations

import pytest

from mlsdc.compiler.graph import Editor, Graph
from mlsdc.compiler.ops_kv import PagedAttention, ReadKv, TreeMask
from mlsdc.compiler.types import TreeType
from tests.passes.graphs import Llama
from tests.passes.steps import also_output, apply, assert_same, before, golden, ops, results

UNFUSED = ("read_kv", "dequantise", "matmul_qk", "tree_mask", "mask", "softmax", "matmul_pv")


def test_golden() -> None:
    golden("fuse-attention", Llama(layers=1))


def test_computes_the_same() -> None:
    graph, pass_ = before("fuse-attention", shape := Llama(windows=(0, 5)))
    assert_same(results(graph, shape), results(apply(graph, pass_), shape))


def test_nothing_of_the_chain_is_left() -> None:
    graph, pass_ = before("fuse-attention")
    found, was = ops(apply(graph, pass_)), ops(graph)
    assert all(was[op] for op in UNFUSED)
    assert not any(found[op] for op in UNFUSED)
    assert found["paged_attention"] == 2


def test_the_fused_node_keeps_layer_scale_and_window() -> None:
    graph, pass_ = before("fuse-attention", Llama(windows=(0, 5)))
    assert apply(graph, pass_)["layers.1.attn.attend"].op == PagedAttention(1, 32**-0.5, window=5, quantise=True)


def test_float_weights_leave_the_result_float() -> None:
    graph, pass_ = before("fuse-attention", weights="none")
    after = apply(graph, pass_)
    assert after["layers.0.attn.attend"].op == PagedAttention(0, 32**-0.5)
    assert ops(after)["reshape"] == ops(graph)["reshape"]


def test_leaves_the_quantise_outside_when_a_group_would_span_two_heads() -> None:
    graph, pass_ = before("fuse-attention", shape := Llama(head_dim=16))
    after = apply(graph, pass_)
    assert after["layers.0.attn.attend"].op == PagedAttention(0, 0.25)
    assert_same(results(graph, shape), results(after, shape))


@pytest.mark.parametrize("leaf", ["keys", "values_f32", "scores", "masked", "probs"])
def test_leaves_a_layer_alone_whose_inside_is_read_by_somebody_else(leaf: str) -> None:
    graph, pass_ = before("fuse-attention")
    after = apply(also_output(graph, f"layers.0.attn.{leaf}"), pass_)
    assert after["layers.0.attn.attend"].op.opname == "matmul_pv"
    assert after["layers.1.attn.attend"].op.opname == "paged_attention"


def changed(graph: Graph, name: str, op: ReadKv | TreeMask, *inputs: str) -> Graph:
    editor = Editor(graph)
    if "tree2" in inputs:
        editor.input("tree2", TreeType())
    editor.replace(name, op, *inputs)
    return editor.finish()


def test_leaves_keys_and_values_of_different_layers_alone() -> None:
    graph, pass_ = before("fuse-attention", Llama(layers=2))
    read = graph["layers.1.attn.values"]
    assert isinstance(read.op, ReadKv)
    mixed = changed(graph, read.name, ReadKv(0, "values", read.op.rows, read.op.ctx), *read.inputs)
    assert apply(mixed, pass_)["layers.1.attn.attend"].op.opname == "matmul_pv"


def test_leaves_keys_and_values_of_different_caches_alone() -> None:
    graph, pass_ = before("fuse-attention", Llama(layers=2))
    read = graph["layers.1.attn.values"]
    assert isinstance(read.op, ReadKv)
    mixed = changed(graph, read.name, read.op, "layers.0.attn.kv", "tree")
    assert apply(mixed, pass_)["layers.1.attn.attend"].op.opname == "matmul_pv"


def test_leaves_a_mask_of_another_tree_alone() -> None:
    graph, pass_ = before("fuse-attention")
    mask = graph["tree_mask"]
    assert isinstance(mask.op, TreeMask)
    after = apply(changed(graph, mask.name, mask.op, "tree2"), pass_)
    assert ops(after)["matmul_pv"] == 2
