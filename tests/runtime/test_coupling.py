"""Guesses that follow the sampler's draws: their probabilities, and how often the first of them is the target's choice."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from once_native import native_functions, ngram_library

from mlsdc.runtime.levels.coupling import Draw, Draws, as_drawn, coupled
from mlsdc.runtime.sampling.noise import gumbel

TURNS = 600
Floats = npt.NDArray[np.float64]


def distribution(rng: np.random.Generator, n: int, sharpness: float) -> Floats:
    made: Floats = np.exp(sharpness * rng.standard_normal(n))
    return made / made.sum()


def guesses(q: Floats) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """One row of guesses, best first."""
    tokens = np.argsort(-q, kind="stable").astype(np.int32)
    return np.log(q[tokens])[None].astype(np.float32), tokens[None]


def choices(p: Floats, seed: int) -> list[int]:
    """What a target that says p draws at turns 0, 1, …"""
    return [int(np.argmax(np.log(p) + gumbel(seed, turn, np.arange(len(p))))) for turn in range(TURNS)]


def firsts(q: Floats, draw: Draw) -> list[int]:
    logp, tokens = (np.repeat(part, TURNS, 0) for part in guesses(q))
    return [int(token) for token in coupled(logp, tokens, [draw] * TURNS, range(TURNS), Draws())[1][:, 0]]


@settings(max_examples=12)
@given(st.integers(0, 1 << 63), st.integers(2, 8), st.floats(0.1, 3.0), st.floats(0.0, 1.0))
def test_the_first_guess_is_right_as_often_as_theory_says(seed: int, n: int, sharpness: float, mixed: float) -> None:
    """P(right) >= (1 - TV) / (1 + TV), and 4 standard errors of the count."""
    rng = np.random.default_rng(seed % (1 << 32))
    p = distribution(rng, n, sharpness)
    q = mixed * p + (1 - mixed) * distribution(rng, n, sharpness)
    tv = 0.5 * np.abs(p - q).sum()
    right = np.mean([a == b for a, b in zip(choices(p, seed), firsts(q, Draw(seed)), strict=True)])
    assert right >= (1 - tv) / (1 + tv) - 4 * 0.5 / TURNS**0.5


def test_who_knows_the_distribution_says_every_choice() -> None:
    p = distribution(np.random.default_rng(1), 8, 1.0)
    assert firsts(p, Draw(5)) == choices(p, 5)


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.3])
def test_guesses_follow_the_temperature(temperature: float) -> None:
    """A level's probabilities are at temperature 1; the request's choices are not."""
    q = distribution(np.random.default_rng(2), 8, 1.0)
    hot = q ** (1 / temperature) / (q ** (1 / temperature)).sum()
    assert firsts(q, Draw(5, temperature)) == choices(hot, 5)


def test_what_the_request_cuts_off_is_not_guessed_first() -> None:
    q = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    assert set(firsts(q, Draw(3, top_k=2))) == {0, 1}
    assert set(firsts(q, Draw(3, top_p=0.8))) == {0, 1, 2}
    assert set(firsts(q, Draw(3, min_p=0.7))) == {0, 1}


@given(st.integers(0, 1 << 32), st.integers(2, 8), st.floats(0.3, 2.0), st.integers(0, 9), st.floats(0.05, 1.0), st.floats(0.0, 1.0))
def test_chances_and_what_is_left_make_one(seed: int, n: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    q = distribution(np.random.default_rng(seed), n + 3, 1.0)
    logp, _ = guesses(q)
    found, rest = as_drawn(logp[:, :n], [Draw(seed, temperature, top_k, top_p, min_p)])
    assert found[0, 0] > 0 and found.min() >= 0 and rest[0] >= 0
    assert np.isclose(found.sum() + rest[0], 1)
    assert np.all(np.diff(found[0]) <= 1e-12)


def test_guesses_at_temperature_one_are_the_levels_own() -> None:
    q = distribution(np.random.default_rng(4), 12, 1.0)
    logp, tokens = guesses(q)
    found, rest = as_drawn(logp[:, :8], [Draw(0)])
    assert np.allclose(found[0], q[tokens[0, :8]])
    assert np.isclose(rest[0], 1 - found.sum())


def test_guesses_of_no_probability_stay_last() -> None:
    """Padding of a vocabulary has none."""
    logp = np.array([[-0.1, -3.0, -np.inf, -np.inf]], np.float32)
    for turn in range(20):
        found, tokens = coupled(logp, np.array([[4, 9, 300, 301]], np.int32), [Draw(1)], [turn], Draws())
        assert tokens[0, 2:].tolist() == [300, 301] and np.all(found[0, 2:] == -np.inf) and np.all(np.isfinite(found[0, :2]))


def test_rows_of_greedy_requests_stay_as_they_are() -> None:
    logp, tokens = (np.repeat(part, 3, 0) for part in guesses(distribution(np.random.default_rng(4), 8, 0.3)))
    found, order = coupled(logp, tokens, [None, Draw(9), None], [5, 6, 7], Draws())
    assert np.array_equal(found[[0, 2]], logp[[0, 2]]) and np.array_equal(order[[0, 2]], tokens[[0, 2]])
    alone = coupled(logp[1:2], tokens[1:2], [Draw(9)], [6], Draws())
    assert np.array_equal(found[1], alone[0][0]) and np.array_equal(order[1], alone[1][0])


def test_native_draws_are_the_oracles(tmp_path_factory: pytest.TempPathFactory) -> None:
    native, oracle = Draws(native_functions(tmp_path_factory, *ngram_library())), Draws()
    rng = np.random.default_rng(0)
    for rows, k in ((1, 8), (5, 8), (3, 4), (9, 8)):
        draws = [Draw(int(seed)) for seed in rng.integers(0, 1 << 64, rows, dtype=np.uint64)]
        turns, tokens = rng.integers(1, 1 << 20, rows), rng.integers(0, 1 << 17, (rows, k)).astype(np.int32)
        assert np.allclose(native.of(draws, turns, tokens), oracle.of(draws, turns, tokens), rtol=1e-12, atol=0)
