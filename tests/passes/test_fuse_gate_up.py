"""fuse-gate-up: SwiGLU and its quantisation in one node."""

from __future__ import annotations

import pytest

from mlsdc.compiler.graph import Editor, Weight
from mlsdc.compiler.ops_core import Binary
from mlsdc.compiler.ops_nn import Gated
from mlsdc.compiler.ops_quant import GatedQuantise
from tests.passes.graphs import Llama
from tests.passes.steps import also_output, apply, assert_same, before, golden, ops, results


def test_golden() -> None:
    golden("fuse-gate-up", Llama(layers=1))


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_computes_the_same(act: str) -> None:
    graph, pass_ = before("fuse-gate-up", shape := Llama(act=act))
    after = apply(graph, pass_)
    assert after["layers.0.mlp.gated"].op == GatedQuantise(act)
    assert_same(results(graph, shape), results(after, shape))


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("weights", ["bf16", "fp8", "int4-a16"])
def test_smaller_weights_over_f32_rows_are_fused_and_compute_the_same(weights: str, act: str) -> None:
    graph, pass_ = before("fuse-gate-up", shape := Llama(act=act), weights=weights)
    after = apply(graph, pass_)
    assert after["layers.1.mlp.gated"].op == Gated(act)
    assert ops(graph)["linear"] - ops(after)["linear"] == 4
    assert_same(results(graph, shape), results(after, shape))


def test_leaves_f32_weights_alone() -> None:
    graph, pass_ = before("fuse-gate-up", weights="none")
    assert apply(graph, pass_) == graph


@pytest.mark.parametrize("leaf", ["gate", "up", "act"])
def test_leaves_a_layer_of_smaller_weights_alone_whose_inside_is_read_by_somebody_else(leaf: str) -> None:
    graph, pass_ = before("fuse-gate-up", weights="bf16")
    assert ops(apply(also_output(graph, f"layers.0.mlp.{leaf}"), pass_))["gated"] == 1


def test_operands_may_stand_in_either_order() -> None:
    graph, pass_ = before("fuse-gate-up", shape := Llama(layers=1))
    editor = Editor(graph)
    editor.replace("layers.0.mlp.gated", Binary("mul"), "layers.0.mlp.up", "layers.0.mlp.act")
    after = apply(editor.finish(), pass_)
    assert ops(after)["gated_quantise"] == 1
    assert_same(results(graph, shape), results(after, shape))


def test_rows_of_the_gate_come_first() -> None:
    graph, pass_ = before("fuse-gate-up", Llama(layers=1))
    weight = apply(graph, pass_)["w.layers.0.mlp.gate_up"]
    assert weight.op == Weight(("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"))


def test_leaves_another_activation_alone() -> None:
    graph, pass_ = before("fuse-gate-up", Llama(act="tanh"))
    assert apply(graph, pass_) == graph


@pytest.mark.parametrize("leaf", ["gate", "up", "act", "gated"])
def test_leaves_a_layer_alone_whose_inside_is_read_by_somebody_else(leaf: str) -> None:
    graph, pass_ = before("fuse-gate-up")
    assert ops(apply(also_output(graph, f"layers.0.mlp.{leaf}"), pass_))["gated_quantise"] == 1
