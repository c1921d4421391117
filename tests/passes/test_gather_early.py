"""gather-early: the final norm of the rows that want logits only."""

from __future__ import annotations

from tests.passes.graphs import Llama
from tests.passes.steps import also_output, apply, assert_same, before, golden, results


def test_golden() -> None:
    golden("gather-early", Llama(layers=1))


def test_computes_the_same() -> None:
    graph, pass_ = before("gather-early", shape := Llama())
    assert_same(results(graph, shape), results(apply(graph, pass_), shape))


def test_leaves_a_norm_alone_whose_rows_are_all_wanted() -> None:
    graph, pass_ = before("gather-early")
    tapped = also_output(graph, "final_norm")
    assert apply(tapped, pass_) == tapped
