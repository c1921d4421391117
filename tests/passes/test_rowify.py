"""rowify: a sequence becomes rows, logits are made for the rows that ask, and what mixes rows is an error that shows the nodes."""

from __future__ import annotations

import pytest
import torch

from mlsdc.compiler.errors import CaptureError
from mlsdc.compiler.ops_core import ArgMax
from mlsdc.compiler.types import Dim
from mlsdc.passes.rowify import Rowify
from tests.passes.captured import assert_close, before, captured, check_golden, logits


def test_golden() -> None:
    graph, pass_ = before("rowify")
    check_golden("rowify", pass_.rewrite(graph))


@pytest.mark.parametrize("form", ["sdpa", "eager"])
def test_computes_the_same(form: str) -> None:
    graph, pass_ = before("rowify", form)
    assert_close(pass_.rewrite(graph), graph)


def test_only_the_rows_that_ask_get_logits_in_the_order_they_ask() -> None:
    graph, pass_ = before("rowify")
    rows = pass_.rewrite(graph)
    torch.testing.assert_close(logits(rows, out_rows=[6, 2]), logits(rows)[[6, 2]])


def test_rows_and_logits_have_their_limits() -> None:
    graph, _ = before("rowify")
    rows = Rowify(48, 12).rewrite(graph)
    assert rows["tokens"].type.shape == (Dim("rows", 1, 48),)  # type: ignore[union-attr]
    assert rows["lm_head"].type.shape == (Dim("out", 1, 12), 96)  # type: ignore[union-attr]


@pytest.mark.parametrize(("vocab_size", "limit"), [(0, 0), (96, 0), (90, 90)])
def test_padding_ids_are_never_chosen(vocab_size: int, limit: int) -> None:
    graph, _ = before("rowify")
    assert Rowify(48, 12, vocab_size).rewrite(graph)["choices"].op == ArgMax(limit)


def test_no_value_has_a_batch_axis() -> None:
    graph, pass_ = before("rowify")
    for node in pass_.rewrite(graph):
        assert 1 not in getattr(node.type, "shape", ()), node.name


def test_attention_that_was_not_raised_is_shown() -> None:
    with pytest.raises(CaptureError) as error:
        Rowify(64, 32).rewrite(captured())
    assert str(error.value).startswith("graph 'forward' cannot become a row program: %causal_mask (causal_mask), %")
    assert "%model.layers.0.self_attn.scaled_dot_product_attention (sdpa, from model.layers.0.self_attn " in str(error.value)
    assert str(error.value).endswith("the nearest rule is sdpa(q, repeat(k), repeat(v), causal_mask) => attention(q, k, v)")


def test_leaves_a_row_program_alone() -> None:
    graph, _ = before("raise-names")
    assert Rowify(64, 32).rewrite(graph) is graph
