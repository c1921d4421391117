"""share-tree-mask: as many masks as there are windows."""

from __future__ import annotations

from mlsdc.compiler.ops_kv import TreeMask
from tests.passes.graphs import Llama
from tests.passes.steps import apply, assert_same, before, golden, results

SHAPE = Llama(layers=3, windows=(0, 8, 0))


def test_golden() -> None:
    golden("share-tree-mask", SHAPE)


def test_computes_the_same() -> None:
    graph, pass_ = before("share-tree-mask", SHAPE)
    assert_same(results(graph, SHAPE), results(apply(graph, pass_), SHAPE))


def test_layers_of_one_window_share_a_mask() -> None:
    graph, pass_ = before("share-tree-mask", SHAPE)
    assert [node.name for node in apply(graph, pass_) if isinstance(node.op, TreeMask)] == ["tree_mask", "tree_mask.window8"]


def test_leaves_a_shared_mask_alone() -> None:
    graph, pass_ = before("share-tree-mask", SHAPE)
    once = apply(graph, pass_)
    assert apply(once, pass_) == once
