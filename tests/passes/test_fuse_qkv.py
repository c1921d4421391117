"""fuse-qkv: one projection, cut by columns."""

from __future__ import annotations

import pytest

from mlsdc.compiler.graph import Editor, Graph, Weight
from mlsdc.compiler.ops_core import Reshape
from mlsdc.compiler.ops_nn import Linear, Rope, RopeTable
from mlsdc.compiler.ops_quant import AppendKvSlice, LinearQ, RopeSlice
from mlsdc.compiler.types import DType, TensorType
from tests.passes.graphs import Llama
from tests.passes.steps import also_output, apply, assert_same, before, golden, ops, results


def test_golden() -> None:
    golden("fuse-qkv", Llama(layers=1))


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("disable", [(), ("fuse-attention",), ("fuse-norm-quantise",)])
def test_computes_the_same(biases: bool, disable: tuple[str, ...]) -> None:
    graph, pass_ = before("fuse-qkv", shape := Llama(biases=biases), disable=disable)
    after = apply(graph, pass_)
    assert ops(after)["append_kv_slice"] == 2
    assert_same(results(graph, shape), results(after, shape))


@pytest.mark.parametrize("biases", [False, True])
def test_packed_weights_over_f32_rows_are_fused_and_compute_the_same(biases: bool) -> None:
    graph, pass_ = before("fuse-qkv", shape := Llama(biases=biases), weights="int4-a16")
    after = apply(graph, pass_)
    assert after["layers.1.attn.qkv"].op == Linear()
    assert after["w.layers.1.attn.qkv"].type == TensorType(DType.Q4, (256, 64))
    assert ops(graph)["linear"] - ops(after)["linear"] == 4
    assert_same(results(graph, shape), results(after, shape))


@pytest.mark.parametrize(("weights", "dtype"), [("bf16", DType.BF16), ("fp8", DType.F8)])
def test_smaller_weights_over_f32_rows_are_fused_and_compute_the_same(weights: str, dtype: DType) -> None:
    graph, pass_ = before("fuse-qkv", shape := Llama(biases=True), weights=weights)
    after = apply(graph, pass_)
    assert after["layers.1.attn.qkv"].op == Linear()
    assert after["w.layers.1.attn.qkv"].type == TensorType(dtype, (256, 64))
    assert ops(graph)["linear"] - ops(after)["linear"] == 4
    assert_same(results(graph, shape), results(after, shape))


def test_leaves_linears_of_f32_weights_alone() -> None:
    graph, pass_ = before("fuse-qkv", weights="none")
    assert apply(graph, pass_) == graph


def test_weight_and_bias_are_stacked_in_the_order_q_k_v() -> None:
    graph, pass_ = before("fuse-qkv", Llama(layers=1, biases=True))
    after = apply(graph, pass_)
    weight, bias = after["w.layers.0.attn.qkv"], after["w.layers.0.attn.qkv.bias"]
    assert weight.op == Weight(tuple(f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"))
    assert bias.op == Weight(tuple(f"model.layers.0.self_attn.{x}_proj.bias" for x in "qkv"))
    assert (weight.type, bias.type) == (TensorType(DType.Q8, (256, 64)), TensorType(DType.F32, (256,)))


def test_columns_follow_the_heads() -> None:
    graph, pass_ = before("fuse-qkv", Llama(layers=1, heads=6, kv_heads=2, head_dim=32))
    after = apply(graph, pass_)
    assert after["layers.0.attn.q_rope"].op == RopeSlice(start=0, heads=6, head_dim=32)
    assert after["layers.0.attn.kv"].op == AppendKvSlice(0, k_start=192, v_start=256)


def test_leaves_a_qk_norm_alone() -> None:
    graph, pass_ = before("fuse-qkv", Llama(qk_norm=True))
    assert apply(graph, pass_) == graph


@pytest.mark.parametrize("leaf", ["q", "k", "v_heads", "k_rope"])
def test_leaves_a_layer_alone_whose_heads_are_read_by_somebody_else(leaf: str) -> None:
    graph, pass_ = before("fuse-qkv")
    after = apply(also_output(graph, f"layers.0.attn.{leaf}"), pass_)
    assert after["layers.0.attn.kv"].op.opname == "append_kv"
    assert after["layers.1.attn.kv"].op.opname == "append_kv_slice"


def test_a_second_reader_of_the_turned_queries_does_no_harm() -> None:
    graph, pass_ = before("fuse-qkv", Llama(layers=1))
    assert ops(apply(also_output(graph, "layers.0.attn.q_rope"), pass_))["rope_slice"] == 1


def first_layer(graph: Graph, edit: str) -> Graph:
    """The graph with one thing of layer 0 changed that fuse-qkv cannot stack."""
    editor = Editor(graph)
    q, k = graph["layers.0.attn.q"], graph["layers.0.attn.k"]
    if edit == "weights of two dtypes":
        type_ = graph["w.layers.0.attn.k"].type
        assert isinstance(type_, TensorType)
        editor.retype("w.layers.0.attn.k", type_.with_dtype(DType.Q4))
    elif edit == "a bias on q only":
        bias = editor.weight("w.layers.0.attn.q.bias", TensorType(DType.F32, (128,)))
        editor.replace(q.name, LinearQ(bias=True), *q.inputs, bias)
    elif edit == "one weight for k and v":
        editor.replace("layers.0.attn.v", LinearQ(), *k.inputs)
    elif edit == "a weight that is an output":
        editor.outputs.append(("extra", k.inputs[1]))
    elif edit == "a table for q and one for k":
        table = editor.add("other_table", RopeTable(2.0), *graph["rope_table"].inputs)
        editor.replace("layers.0.attn.k_rope", Rope(), "layers.0.attn.k_heads", table)
    elif edit == "half of each head turned":
        editor.retype("w.inv_freq", TensorType(DType.F32, (8,)))
    elif edit == "a second candidate for q":
        twin = editor.add("twin", LinearQ(), q.inputs[0], editor.weight("w.twin", graph[q.inputs[1]].type))
        twin = editor.add("twin_heads", Reshape((-1, 4, 32)), twin)
        editor.outputs.append(("extra", editor.add("twin_rope", Rope(), twin, "rope_table")))
    return editor.finish()


EDITS = ["weights of two dtypes", "a bias on q only", "one weight for k and v", "a weight that is an output", "a table for q and one for k",
         "half of each head turned", "a second candidate for q"]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_leaves_alone(edit: str) -> None:
    graph, pass_ = before("fuse-qkv", Llama(layers=1))
    changed = first_layer(graph, edit)
    assert apply(changed, pass_) == changed
