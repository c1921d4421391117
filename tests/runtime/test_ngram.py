"""The n-gram level's live half."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proposers import ngram

from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.levels.base import LevelState
from mlsdc.runtime.levels.coupling import Draw
from mlsdc.runtime.levels.ngram import NgramState
from mlsdc.runtime.tree import EMPTY

TOKENS = st.lists(st.integers(0, 5), max_size=60)


def snapshot(state: LevelState) -> object:
    assert isinstance(state, NgramState)
    records = {context: (record.total, record.distinct, record.top) for context, record in state.records.items()}
    return state.history, records, state.pairs, state.journal


@given(TOKENS, TOKENS)
def test_rollback_leaves_no_trace(before: list[int], after: list[int]) -> None:
    state, other = ngram().start(), ngram().start()
    state.observe(before)
    state.observe(after)
    state.rollback(len(after))
    other.observe(before)
    assert snapshot(state) == snapshot(other)


@given(st.lists(st.integers(0, 40), min_size=40, max_size=100), st.integers(1, 200))
def test_rollback_restores_followers_that_were_pushed_out(tokens: list[int], count: int) -> None:
    state, other = ngram(order=1).start(), ngram(order=1).start()
    spaced = [x for token in tokens for x in (0, token)]  # one context with many followers
    state.observe(spaced)
    state.rollback(count)
    other.observe(spaced[: max(0, len(spaced) - count)])
    assert snapshot(state) == snapshot(other)


@given(TOKENS, st.integers(0, 20), st.integers(1, 8), st.integers(1, 4))
def test_proposals_are_valid_trees_within_the_budget(tokens: list[int], budget: int, order: int, width: int) -> None:
    state = ngram(order=order, width=width).start()
    state.observe(tokens)
    tree = state.propose(budget)
    assert len(tree) <= budget
    assert set(tree.tokens) <= set(tokens)
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree)  # no two equal siblings
    children = [tree.parents.count(parent) for parent in set(tree.parents)]
    assert max(children, default=0) <= width


@given(TOKENS, st.lists(st.integers(1, 7), max_size=60))
def test_proposals_do_not_depend_on_how_tokens_came(tokens: list[int], cuts: list[int]) -> None:
    whole, cut = ngram().start(), ngram().start()
    whole.observe(tokens)
    rest = list(tokens)
    for size in cuts:
        cut.observe(rest[:size])
        cut.propose(4)
        del rest[:size]
    cut.observe(rest)
    assert whole.propose(12) == cut.propose(12)


@given(TOKENS)
def test_a_smaller_budget_gives_the_beginning_of_the_larger_tree(tokens: list[int]) -> None:
    state = ngram().start()
    state.observe(tokens)
    large, small = state.propose(12), state.propose(5)
    assert small.tokens == large.tokens[:5]
    assert small.parents == large.parents[:5]


def test_where_counts_are_right_the_coupled_child_is_the_samplers_choice() -> None:
    """Law L1's choice is the largest of log p + Gumbel: who knows p and looks at the same draws says it before it is made."""
    from mlsdc.runtime.sampling.noise import gumbel

    history = [1, 2, 1, 3, 1, 2, 1, 4, 1, 3, 1, 2, 1]
    uncoupled = 0
    for seed in range(50):
        state = ngram(order=1, width=8).start()
        assert isinstance(state, NgramState)
        state.observe(history)
        known = {token: float(p) for p, token in state._followers([1])}
        choice = int((gumbel(seed, len(history), np.arange(6)) + np.log([known.get(i, 1e-9) for i in range(6)])).argmax())
        uncoupled += state.propose(1).tokens[0] == choice
        state.couple(Draw(seed))
        assert state.propose(1).tokens[0] == choice
    assert uncoupled < 40


def test_an_empty_history_proposes_nothing() -> None:
    assert ngram().start().propose(8) == EMPTY


def test_what_followed_a_context_is_proposed_again() -> None:
    state = ngram(width=1).start()
    state.observe([1, 2, 3, 4, 5, 6, 1, 2])
    assert state.propose(4).tokens == (3, 4, 5, 6)


def test_the_more_frequent_continuation_comes_first() -> None:
    state = ngram().start()
    state.observe([1, 2, 9, 1, 2, 9, 1, 3, 9, 1])
    tree = state.propose(8)
    roots = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == -1]
    assert roots[:2] == [2, 3]


def test_of_equals_the_latest_continuation_comes_first() -> None:
    state = ngram(width=2).start()
    state.observe([1, 2, 9, 1, 3, 9, 1])
    tree = state.propose(16)
    roots = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == -1]
    assert roots == [3, 2]


def test_interpolation_is_witten_bell() -> None:
    state = ngram(order=2, min_probability=0).start()
    assert isinstance(state, NgramState)
    state.observe([1, 2, 3, 4, 2, 5, 1, 2])  # after 2: 3 once, 5 once; after (1, 2): 3 once; of all 8: 3 once, 5 once, 5 different
    found = {token: p for p, token in state._followers((1, 2))}
    shortest = 1 / (8 + 5)
    after_2 = (1 + 2 * shortest) / (2 + 2)
    assert found[3] == pytest.approx((1 + 1 * after_2) / (1 + 1))
    assert found[5] == pytest.approx(1 * after_2 / (1 + 1))


@pytest.mark.parametrize(("key", "value"), [
    ("order", 0), ("width", 9), ("max_nodes", 64), ("min_probability", 1.5), ("order", True), ("width", "2"),
])
def test_parameters_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ArtifactError, match=f"level 'ngram': {key} is"):
        ngram(**{key: value})


@settings(max_examples=5)
@given(st.integers(0, 1000))
def test_repeated_text_is_proposed_to_the_end_of_the_budget(start: int) -> None:
    text = [start + i for i in range(20)]
    state = ngram(width=1).start()
    state.observe([*text, *text[:4]])
    assert list(state.propose(10).tokens) == text[4:14]
