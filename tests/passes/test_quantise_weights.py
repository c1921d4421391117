"""quantise-weights: packed weights, one quantised form per input, and what stays as it is."""

from __future__ import annotations

from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.ops_core import Scalar, Unary
from mlsdc.compiler.ops_nn import Linear
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.passes.quantise_weights import QuantiseWeights
from tests.passes.graphs import TINY, Llama
from tests.passes.steps import also_output, apply, before, golden, ops, relative_error, results


def dtypes(graph: Graph) -> dict[str, DType]:
    return {node.name.removeprefix("w."): node.type.dtype for node in graph.weights() if isinstance(node.type, TensorType)}


def quantised(shape: Llama = TINY, weights: str = "int8") -> Graph:
    graph, pass_ = before("quantise-weights", shape, weights=weights)
    return apply(graph, pass_)


def test_golden() -> None:
    golden("quantise-weights", Llama(layers=1))


def test_int8_logits_are_close_to_those_of_f32() -> None:
    graph, pass_ = before("quantise-weights", shape := Llama(biases=True))
    for found, wanted in zip(results(apply(graph, pass_), shape), results(graph, shape), strict=True):
        assert relative_error(found["logits"], wanted["logits"]) < 0.03


def test_linears_over_one_input_share_its_quantised_form() -> None:
    after = quantised(Llama(layers=1))
    assert len(after.users["layers.0.attn_norm.a8"]) == 3
    assert ops(after)["quantise"] == 5  # attn_norm, merged, mlp_norm, gated, out_hidden


def test_a_tied_table_stays_one_weight() -> None:
    after = quantised(Llama(layers=1))
    assert after.users["w.embed"] == ("embed", "lm_head")
    assert dtypes(after)["embed"] is DType.Q8


def test_norms_and_biases_stay_f32() -> None:
    plain = {name for name, dtype in dtypes(quantised(Llama(layers=1, biases=True))).items() if dtype is DType.F32}
    assert plain == {"inv_freq", "layers.0.attn_norm", "layers.0.mlp_norm", "final_norm", *(f"layers.0.attn.{x}.bias" for x in "qkv")}


def test_int4_keeps_embedding_and_head_at_8_bits() -> None:
    found = dtypes(quantised(Llama(layers=1, tied=False), "int4"))
    assert found["embed"] is found["lm_head"] is DType.Q8
    assert {found[f"layers.0.{leaf}"] for leaf in ("attn.q", "attn.out", "mlp.gate", "mlp.down")} == {DType.Q4}


def test_none_leaves_the_graph_alone() -> None:
    graph, pass_ = before("quantise-weights", weights="none")
    assert apply(graph, pass_) == graph


def test_leaves_weights_of_broken_groups_alone() -> None:
    graph, pass_ = before("quantise-weights", Llama(hidden=48, mlp=80))
    after = apply(graph, pass_)
    assert set(dtypes(after).values()) == {DType.F32, DType.Q8}
    assert {name for name, dtype in dtypes(after).items() if dtype is DType.Q8} == {f"layers.{i}.attn.out" for i in (0, 1)}


def test_leaves_a_weight_alone_that_is_multiplied_by_itself() -> None:
    b = Builder("forward")
    w = b.weight("w", TensorType(DType.F32, (64, 64)))
    graph = b.build(y=b.add("y", Linear(), w, w))
    assert QuantiseWeights().rewrite(graph) == graph


def test_leaves_a_weight_alone_that_is_an_output() -> None:
    graph, pass_ = before("quantise-weights")
    after = apply(also_output(graph, "w.layers.0.attn.q"), pass_)
    assert after["layers.0.attn.q"] == graph["layers.0.attn.q"]
    assert after["layers.0.attn.k"].op.opname == "linear_q"


def test_int4_keeps_a_head_behind_a_soft_cap_at_8_bits() -> None:
    b = Builder("forward")
    x, w = b.input("x", TensorType(DType.F32, (Dim("rows", 1, 4), 64))), b.weight("w", TensorType(DType.F32, (96, 64)))
    small = b.add("uncap", Scalar("div", 30.0), b.add("head", Linear(), x, w))
    capped = b.add("cap", Scalar("mul", 30.0), b.add("tanh", Unary("tanh"), small))
    graph = b.build(logits=capped)
    assert dtypes(QuantiseWeights("int4").rewrite(graph)) == {"w": DType.Q8}


def test_bf16_rounds_weights_and_leaves_the_ops() -> None:
    graph, pass_ = before("quantise-weights", shape := Llama(layers=1, biases=True), weights="bf16")
    after = apply(graph, pass_)
    assert ops(after) == ops(graph)
    assert {name for name, dtype in dtypes(after).items() if dtype is DType.BF16} >= {"embed", "layers.0.attn.q", "layers.0.mlp.down"}
    for found, wanted in zip(results(after, shape), results(graph, shape), strict=True):
        assert relative_error(found["logits"], wanted["logits"]) < 0.02
