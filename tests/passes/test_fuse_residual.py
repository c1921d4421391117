"""fuse-residual: the residual stream goes through the linear."""

from __future__ import annotations

import pytest

from mlsdc.compiler.graph import Editor
from mlsdc.compiler.ops_core import Binary
from mlsdc.compiler.ops_quant import LinearQ
from tests.passes.graphs import Llama
from tests.passes.steps import also_output, apply, assert_same, before, golden, ops, results


def test_golden() -> None:
    golden("fuse-residual", Llama(layers=1))


def test_computes_the_same() -> None:
    graph, pass_ = before("fuse-residual", shape := Llama())
    after = apply(graph, pass_)
    assert not ops(after)["binary"]
    assert_same(results(graph, shape), results(after, shape))


def test_operands_may_stand_in_either_order() -> None:
    graph, pass_ = before("fuse-residual", shape := Llama(layers=1))
    editor = Editor(graph)
    editor.replace("layers.0.mlp.residual", Binary("add"), "layers.0.mlp.down", "layers.0.attn.residual")
    after = apply(editor.finish(), pass_)
    assert after["layers.0.mlp.residual"].op == LinearQ(residual=True)
    assert_same(results(graph, shape), results(after, shape))


@pytest.mark.parametrize("leaf", ["attn.out", "mlp.down"])
def test_leaves_a_linear_alone_that_somebody_else_reads(leaf: str) -> None:
    graph, pass_ = before("fuse-residual", Llama(layers=1))
    after = apply(also_output(graph, f"layers.0.{leaf}"), pass_)
    assert ops(after)["binary"] == 1
    assert after[f"layers.0.{leaf}"].op == LinearQ()


def test_leaves_twice_the_same_linear_alone() -> None:
    graph, pass_ = before("fuse-residual", Llama(layers=1))
    editor = Editor(graph)
    editor.replace("layers.0.mlp.residual", Binary("add"), "layers.0.mlp.down", "layers.0.mlp.down")
    assert apply(editor.finish(), pass_)["layers.0.mlp.residual"].op == Binary("add")


def test_leaves_an_addition_that_broadcasts_alone() -> None:
    graph, pass_ = before("fuse-residual", Llama(layers=1))
    editor = Editor(graph)
    editor.replace("layers.0.mlp.residual", Binary("add"), "w.final_norm", "layers.0.mlp.down")
    assert apply(editor.finish(), pass_)["layers.0.mlp.residual"].op == Binary("add")


def test_leaves_another_operation_alone() -> None:
    graph, pass_ = before("fuse-residual", Llama(layers=1))
    editor = Editor(graph)
    editor.replace("layers.0.mlp.residual", Binary("sub"), "layers.0.attn.residual", "layers.0.mlp.down")
    assert apply(editor.finish(), pass_)["layers.0.mlp.residual"].op == Binary("sub")
