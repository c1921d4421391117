"""What the native routine draws is the exact distribution of each filter (chi-square, 200k draws), with any draft (A23)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from native import NativeSampler, step

from mlsdc.runtime.sampling.noise import gumbel
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.step import Array

DRAWS = 200_000
LOGITS = np.log(np.array([0.3, 0.22, 0.15, 0.13, 0.08, 0.06, 0.04, 0.02])).astype(np.float32)
TOKENS = [2, 5, 1, 1, 4, 1]  # a prompt of 3, then output
CASES = {
    "plain": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=2.0),
    "top_k": SamplingParams(temperature=1.0, top_k=3),
    "top_p": SamplingParams(temperature=1.0, top_p=0.75),
    "top_k_top_p": SamplingParams(temperature=1.0, top_k=5, top_p=0.7),
    "min_p": SamplingParams(temperature=1.0, min_p=0.25),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=1.5),
    "frequency": SamplingParams(temperature=1.0, frequency_penalty=0.6),
    "presence": SamplingParams(temperature=1.0, presence_penalty=-1.0),
    "bias": SamplingParams(temperature=1.0, logit_bias={0: -2.0, 7: 3.0, 1: -100.0}),
    "min_tokens": SamplingParams(temperature=1.0, min_tokens=50),
    "all": SamplingParams(temperature=0.8, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3,
                          presence_penalty=0.4, logit_bias={6: 2.0}, min_tokens=50),
}


def exact(params: SamplingParams) -> Array:
    """The distribution by its definition, in f64, step by step."""
    x = LOGITS.astype(np.float64)
    for token, amount in params.logit_bias.items():
        x[token] += amount
    output = TOKENS[3:]
    for token in set(TOKENS):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.min_tokens:
        x[[3, 7]] = -np.inf
    p = np.exp(x / params.temperature)
    order = sorted(range(8), key=lambda i: (-p[i], i))
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        before = 0.0
        for i in order:
            mass = p[i]
            if before >= params.top_p:
                p[i] = 0
            before += mass
    p[p < params.min_p * p.max()] = 0
    return np.asarray(p / p.sum())


def chi_square(counts: Array, p: Array) -> float:
    """Pearson's statistic over the tokens that can be; draws of the others fail at once."""
    assert counts[p == 0].sum() == 0
    expected = p * counts.sum()
    return float(((counts - expected) ** 2)[p > 0] @ (1 / expected[p > 0]))


def draw(sampler: NativeSampler, params: SamplingParams, draws: int) -> Array:
    rows = 24
    counts = np.zeros(8, np.int64)
    buffers = step([params] * rows, [0] * rows, [TOKENS] * rows)
    seeds = buffers.sampling.view(np.uint64)[:rows, 6]
    logits = np.tile(LOGITS, (rows, 1))
    for first in range(0, draws, rows):
        seeds[:] = np.arange(first, first + rows)
        counts += np.bincount(sampler.run(buffers, logits), minlength=8)
    return counts


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_exact_distribution(samplers: Callable[[str], NativeSampler], name: str) -> None:
    params = CASES[name]
    p = exact(params)
    limit = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3}  # chi-square at 0.001, by degrees of freedom
    assert chi_square(draw(samplers("tiny"), params, DRAWS), p) < limit[int((p > 0).sum()) - 1]


def test_positions_of_one_seed_are_independent_draws(samplers: Callable[[str], NativeSampler]) -> None:
    sampler, rows = samplers("tiny"), 24
    counts = np.zeros((8, 8), np.int64)
    for seed in range(4000):
        buffers = step([SamplingParams(temperature=1.0)] * rows, [seed] * rows, [[1]] * rows)
        buffers.positions[:rows] = range(rows)
        found = sampler.run(buffers, np.tile(LOGITS, (rows, 1)))
        np.add.at(counts, (found[:-1], found[1:]), 1)
    p = np.exp(LOGITS.astype(np.float64))
    assert chi_square(counts.reshape(-1), np.outer(p, p).reshape(-1) / p.sum() ** 2) < 112  # 63 degrees of freedom at 0.0001


P, Q = np.array([0.7, 0.3]), np.array([0.5, 0.5])


def test_cutting_drafts_by_what_they_are_biases_rejection_but_not_sample_then_match() -> None:
    """DSpark's fact: a draft is verified only if it is token 0 (its later confidence is high then), else it is cut.

    Rejection then gives token 0 with 0.5 * 1 + 0.5 * 0.7 = 0.85. With law L1 the choice is made without the draft.
    """
    rng = np.random.default_rng(0)
    draws = 100_000
    drafted = rng.choice(2, draws, p=Q)
    fresh = rng.choice(2, draws, p=P)
    accepted = (drafted == 0) & (rng.random(draws) < np.minimum(1, P[drafted] / Q[drafted]))
    rejection = np.where(accepted, drafted, fresh)
    assert np.mean(rejection == 0) == pytest.approx(0.85, abs=0.01)
    committed = []
    for seed in range(draws // 5):
        choice = int(np.argmax(np.log(P) + gumbel(seed, 1, np.arange(2))))
        verified = drafted[seed] == 0
        match = verified and drafted[seed] == choice
        committed.append(int(drafted[seed]) if match else choice)
    assert np.mean(np.array(committed) == 0) == pytest.approx(0.7, abs=0.015)
