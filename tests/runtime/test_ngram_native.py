"""The n-gram level's native code: what the plain Python state says, for any history and any way of getting there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from once_native import native_functions, ngram_library

from mlsdc.runtime.device.base import NativeFunction
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.levels.counts import Counts
from mlsdc.runtime.levels.coupling import Draw
from mlsdc.runtime.levels.ngram import NgramLevel
from mlsdc.runtime.levels.ngram_native import NativeNgramLevel, NativeNgramState, block
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.tree import EMPTY, Tree

Functions = Callable[[str], "NativeFunction | None"]
ORDERS = (1, 4)
TOKENS = st.lists(st.integers(0, 7), max_size=80)
FLAT = st.lists(st.integers(0, 60), max_size=150)  # contexts with more followers than slots


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Functions:
    return native_functions(tmp_path_factory, *ngram_library())


def info(**params: float) -> LevelInfo:
    return LevelInfo("ngram", "ngram", params)


def start(functions: Functions, **params: float) -> NativeNgramState:
    state = NativeNgramLevel(info(**params), 0, functions).start()
    assert isinstance(state, NativeNgramState)
    return state


def assert_same(found: Tree, expected: Tree) -> None:
    assert found.tokens == expected.tokens
    assert found.parents == expected.parents
    assert found.levels == expected.levels
    np.testing.assert_allclose(found.logq, expected.logq, rtol=1e-5, atol=1e-6)


@settings(max_examples=150)
@given(st.lists(st.tuples(TOKENS | FLAT, st.integers(0, 100), st.integers(0, 20)), max_size=6), st.sampled_from(ORDERS),
       st.integers(1, 8), st.sampled_from([0.0, 0.01, 0.2]))
def test_every_proposal_is_the_plain_states(functions: Functions, steps: list[tuple[list[int], int, int]], order: int, width: int,
                                            floor: float) -> None:
    params = {"order": order, "width": width, "min_probability": floor, "max_nodes": 20}
    native, plain = start(functions, **params), NgramLevel(info(**params)).start()
    for tokens, back, budget in steps:
        native.observe(tokens)
        plain.observe(tokens)
        assert_same(native.propose(budget), plain.propose(budget))
        native.rollback(back)
        plain.rollback(back)
        assert_same(native.propose(budget), plain.propose(budget))


@given(TOKENS | FLAT, TOKENS | FLAT)
def test_rollback_leaves_the_bytes_of_a_state_that_never_saw_the_tokens(functions: Functions, before: list[int], after: list[int]) -> None:
    state, other = start(functions), start(functions)
    state.observe(before)
    state.observe(after)
    state.rollback(len(after))
    other.observe(before)
    assert np.array_equal(state.words, other.words)


@given(FLAT, st.lists(st.integers(1, 7), max_size=60))
def test_bytes_do_not_depend_on_how_tokens_came(functions: Functions, tokens: list[int], cuts: list[int]) -> None:
    whole, cut = start(functions), start(functions)
    whole.observe(tokens)
    rest = list(tokens)
    for size in cuts:
        cut.observe(rest[:size])
        cut.propose(4)
        del rest[:size]
    cut.observe(rest)
    assert np.array_equal(whole.words, cut.words)


def test_a_state_that_has_grown_says_what_one_that_was_large_says(functions: Functions) -> None:
    tokens = np.random.default_rng(0).integers(0, 40, 3000).tolist()
    grown, large = start(functions), start(functions)
    large.observe(tokens)
    for i in range(0, 3000, 7):
        grown.observe(tokens[i : i + 7])
    assert grown.history.tolist() == tokens
    assert grown.propose(16) == large.propose(16)
    grown.rollback(2900)
    large.rollback(2900)
    assert grown.propose(16) == large.propose(16)


def test_rolling_back_more_than_there_is_empties_the_state(functions: Functions) -> None:
    state = start(functions)
    state.observe([1, 2, 3])
    state.rollback(10)
    assert np.array_equal(state.words, start(functions).words)
    assert state.propose(8) == EMPTY


def test_an_empty_history_proposes_nothing(functions: Functions) -> None:
    assert start(functions).propose(8) == EMPTY


def test_a_budget_of_none_or_less_proposes_nothing(functions: Functions) -> None:
    state = start(functions)
    state.observe([1, 2, 1])
    assert state.propose(0) == state.propose(-1) == EMPTY


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 12), max_size=60), min_size=1, max_size=3),
       st.lists(st.tuples(TOKENS, st.integers(0, 30)), max_size=4), st.sampled_from(ORDERS), st.integers(0, 4),
       st.sampled_from([0.5, 1.0, 32.0]))
def test_static_counts_are_added_to_the_requests_own_as_in_the_plain_state(
        functions: Functions, tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], steps: list[tuple[list[int], int]],
        order: int, longest: int, weight: float) -> None:
    counts = counted(tmp_path_factory, [[1, 2], *texts], longest)
    params = {"order": order, "max_nodes": 20, "live_weight": weight, "width": 8}
    native, plain = NativeNgramLevel(info(**params), 0, functions, counts).start(), NgramLevel(info(**params), 0, counts).start()
    for tokens, back in steps:
        native.observe(tokens)
        plain.observe(tokens)
        assert_same(native.propose(16), plain.propose(16))
        native.rollback(back)
        plain.rollback(back)
        assert_same(native.propose(16), plain.propose(16))


@settings(max_examples=60)
@given(TOKENS | FLAT, st.integers(0, 2**64 - 1), st.integers(1, 20))
def test_coupled_proposals_are_the_plain_states(functions: Functions, tokens: list[int], seed: int, budget: int) -> None:
    native, plain = start(functions, max_nodes=20), NgramLevel(info(max_nodes=20)).start()
    for state in (native, plain):
        state.couple(Draw(seed))
        state.observe(tokens)
    assert_same(native.propose(budget), plain.propose(budget))


def test_what_the_request_says_outweighs_static_counts(functions: Functions, tmp_path_factory: pytest.TempPathFactory) -> None:
    counts = counted(tmp_path_factory, [[5, 6, 7, 8] * 3], 3)
    state = NativeNgramLevel(info(width=1, live_weight=32.0), 0, functions, counts).start()
    state.observe([5])
    assert state.propose(3).tokens == (6, 7, 8)
    state.observe([9, 5])
    assert state.propose(1).tokens == (9,)


def counted(factory: pytest.TempPathFactory, texts: list[list[int]], order: int) -> Counts:
    from mlsdc.compiler.counts import write_counts

    path = factory.mktemp("counts") / "x.counts"
    write_counts(path, [(text, 0) for text in texts], order=order, vocab_size=64, max_bytes=100_000, tokenizer="", source="")
    return Counts.open(path, 64)


def test_an_artifact_without_the_functions_is_refused() -> None:
    with pytest.raises(ArtifactError, match="level 'ngram': the artifact has no native 'ngram_observe' of order 4; compile again"):
        NativeNgramLevel(info(), 0, lambda _: None)


def test_tables_are_at_most_three_quarters_full() -> None:
    for tokens in (1, 10, 512, 513, 5000):
        words = block(tokens, 4)
        assert 5 * tokens <= 0.75 * (int(words[1]) + 1)


def test_the_real_artifact_drafts_natively(smollm2: Path) -> None:
    from mlsdc.runtime.engine import Engine

    with Engine.load(smollm2, threads=1) as engine:
        assert isinstance(engine.drafting.levels[0], NativeNgramLevel)
