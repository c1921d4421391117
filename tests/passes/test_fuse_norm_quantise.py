"""fuse-norm-quantise: a norm that is only read quantised."""

from __future__ import annotations

from mlsdc.compiler.ops_quant import NormQuantise
from tests.passes.graphs import Llama
from tests.passes.steps import also_output, apply, assert_same, before, golden, results


def test_golden() -> None:
    golden("fuse-norm-quantise", Llama(layers=1))


def test_computes_the_same() -> None:
    graph, pass_ = before("fuse-norm-quantise", shape := Llama())
    assert_same(results(graph, shape), results(apply(graph, pass_), shape))


def test_one_norm_serves_all_linears_behind_it() -> None:
    graph, pass_ = before("fuse-norm-quantise", Llama(layers=1))
    after = apply(graph, pass_)
    assert after["layers.0.attn_norm"].op == NormQuantise(1e-5)
    assert after.users["layers.0.attn_norm"] == ("layers.0.attn.q", "layers.0.attn.k", "layers.0.attn.v")


def test_leaves_a_norm_alone_that_is_read_unquantised() -> None:
    graph, pass_ = before("fuse-norm-quantise", Llama(layers=1))
    after = apply(also_output(graph, "layers.0.attn_norm"), pass_)
    assert after["layers.0.attn_norm"].op.opname == "rms_norm"
    assert after["layers.0.mlp_norm"].op.opname == "norm_quantise"


def test_leaves_the_final_norm_alone_whose_rows_are_gathered_after_it() -> None:
    graph, pass_ = before("fuse-norm-quantise", Llama(layers=1), disable=("gather-early",))
    assert apply(graph, pass_)["final_norm"].op.opname == "rms_norm"
