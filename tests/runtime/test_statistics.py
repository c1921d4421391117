"""The figures of speculation, by their one definition."""

from __future__ import annotations

import pytest
from fake_device import make_engine
from proposers import LEVELS

from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.statistics import Statistics


def three_chains() -> Statistics:
    """Steps with four drafted nodes and 4, 0, 2 of them accepted (FIELD B9)."""
    statistics = Statistics()
    for accepted in (4, 0, 2):
        statistics.count_step(["ngram"] * 4, [1, 2, 3, 4], set(range(accepted)))
    return statistics


def test_drafted_accepted_rate_and_length() -> None:
    s = three_chains()
    assert (s.drafted, s.accepted, s.acceptance_rate, s.acceptance_length) == (12, 6, 0.5, 3.0)


def test_rate_per_depth_is_of_steps_that_offered_it() -> None:
    rates = [d.rate for d in three_chains().levels["ngram"].depths]
    assert rates == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3])


def test_siblings_are_drafted_each_but_offer_a_depth_once() -> None:
    s = Statistics()
    s.count_step(["a", "a", "b"], [1, 1, 1], {1})
    assert (s.levels["a"].drafted, s.levels["a"].depths[0].offered, s.levels["a"].depths[0].accepted) == (2, 1, 1)
    assert (s.levels["b"].drafted, s.levels["b"].depths[0].offered, s.levels["b"].depths[0].accepted) == (1, 1, 0)


def test_a_step_without_drafts_counts_in_the_length_only() -> None:
    s = three_chains()
    s.count_step([], [], set())
    assert (s.steps, s.acceptance_rate, s.acceptance_length) == (4, 0.5, 2.5)


def test_merging_adds_every_count() -> None:
    total = Statistics()
    total.merge(three_chains())
    total.merge(three_chains())
    assert (total.drafted, total.accepted, total.steps, total.levels["ngram"].depths[3].offered) == (24, 12, 6, 6)


def test_no_step_gives_zeros_not_errors() -> None:
    s = Statistics()
    assert (s.acceptance_rate, s.acceptance_length) == (0.0, 0.0)


def test_the_engine_counts_by_level_and_depth() -> None:
    (result,) = make_engine(LEVELS["oracle"](), drafts=3).generate([[1, 2, 3]], SamplingParams(max_tokens=13))
    s = result.statistics
    assert (s.tokens, s.steps, s.drafted, s.accepted) == (13, 3, 9, 9)
    assert [d.offered for d in s.levels["draft"].depths] == [3, 3, 3]
    assert s.tokens == 1 + s.steps + s.accepted  # the prompt's own choice, and a bonus token a step
