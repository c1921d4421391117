"""The native routine makes the oracle's choices, row for row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native import NativeSampler, step, tree_step

from mlsdc.runtime.sampling import oracle
from mlsdc.runtime.sampling_params import Grammar, SamplingParams
from mlsdc.runtime.step import Array

Samplers = Callable[[str], NativeSampler]
SEEDS = st.integers(0, (1 << 64) - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.1, 0.7, 1.0, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([-1, 0, 0, 0, 1, 2, 5, 90, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999, 1 - 1e-12]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.6, 1.4]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -1.5]),
    logit_bias=st.dictionaries(st.integers(0, 7), st.floats(-100, 100, width=32), max_size=4),
    min_tokens=st.sampled_from([0, 0, 20]),
    logprobs=st.sampled_from([None, None, 0, 1, 20]),
)


def logits_like(rng: np.random.Generator, rows: int, vocab: int) -> Array:
    """Flat, peaked, rounded (many equal logits), or with tokens that cannot be."""
    x = rng.normal(size=(rows, vocab)) * rng.choice([0.1, 1.0, 3.0, 20.0])
    kind = rng.integers(4)
    if kind == 0:
        x = np.round(x)
    if kind == 1:
        x[rng.random(x.shape) < 0.5] = -np.inf
    return x.astype(np.float32)


def check(sampler: NativeSampler, params: list[SamplingParams], seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, sampler.vocab, rng.integers(3, 60)).tolist() for _ in params]
    buffers = step(params, [int(x) for x in rng.integers(0, 1 << 63, len(params))], tokens)
    logits = logits_like(rng, len(params), sampler.vocab)
    found = sampler.run(buffers, logits, backwards=bool(seed % 2))
    ids, values = buffers.logprob_ids.copy(), buffers.logprobs.copy()
    oracle.sample(buffers, logits, sampler.vocab)
    assert found.tolist() == buffers.choices[: len(params)].tolist()
    for row, own in enumerate(params):
        if own.logprobs is not None:
            count = min(1 + own.logprobs, 1 + int((logits[row] > -np.inf).sum()))
            assert ids[row, :count].tolist() == buffers.logprob_ids[row, :count].tolist()
            np.testing.assert_allclose(values[row, :count], buffers.logprobs[row, :count], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("shape", ["tiny", "padded", "large"])
@settings(max_examples=60)
@given(st.lists(PARAMS, min_size=1, max_size=9), SEEDS)
def test_native_choices_are_the_oracles(samplers: Samplers, shape: str, params: list[SamplingParams], seed: int) -> None:
    check(samplers(shape), params, seed % (1 << 32))


@settings(max_examples=60)
@given(PARAMS, SEEDS, st.lists(st.integers(-1, 13), min_size=1, max_size=15))
def test_tree_rows_count_their_own_ancestors(samplers: Samplers, params: SamplingParams, seed: int, parents: list[int]) -> None:
    sampler = samplers("tiny")
    rng = np.random.default_rng(seed % (1 << 32))
    parents = [min(parent, i - 1) for i, parent in enumerate(parents)]
    committed, drafted = rng.integers(0, 8, 10).tolist(), rng.integers(0, 8, len(parents)).tolist()
    buffers = tree_step(params, seed, committed, drafted, parents, 6)
    logits = logits_like(rng, 1 + len(drafted), sampler.vocab)
    found = sampler.run(buffers, logits)
    for row in range(1 + len(drafted)):  # each row is the last row of a sequence that committed its path
        path: list[int] = []
        at = row - 1
        while at >= 0:
            path.insert(0, drafted[at])
            at = parents[at]
        alone = step([params], [seed], [[*committed, *path]], 6)
        oracle.sample(alone, logits[row : row + 1], sampler.vocab)
        assert found[row] == alone.choices[0]


@pytest.mark.parametrize("shape", ["tiny", "padded", "large"])
@settings(max_examples=40)
@given(st.lists(PARAMS.filter(lambda params: not params.min_tokens), min_size=1, max_size=6), SEEDS)
def test_what_a_grammar_forbids_is_never_chosen(samplers: Samplers, shape: str, params: list[SamplingParams], seed: int) -> None:
    sampler = samplers(shape)
    rng = np.random.default_rng(seed % (1 << 32))
    masked = [rng.random() < 0.7 for _ in params]
    own = [SamplingParams(**{**vars(p), "grammar": Grammar("json_object")}) if m else p for p, m in zip(params, masked, strict=True)]
    tokens = [rng.integers(0, sampler.vocab, rng.integers(3, 60)).tolist() for _ in own]
    buffers = step(own, [int(x) for x in rng.integers(0, 1 << 63, len(own))], tokens, vocab=sampler.vocab)
    buffers.masks[:] = rng.integers(0, 1 << 32, buffers.masks.shape, np.uint32)
    buffers.masks[rng.random(buffers.masks.shape) < 0.3] = 0
    buffers.masks[rng.random(buffers.masks.shape) < 0.3] = 0xFFFFFFFF
    buffers.masks[:, 0] |= 1  # some token may always come
    logits = logits_like(rng, len(own), sampler.vocab)
    logits[:, 0] = np.maximum(logits[:, 0], -50)
    found = sampler.run(buffers, logits)
    oracle.sample(buffers, logits, sampler.vocab)
    assert found.tolist() == buffers.choices[: len(own)].tolist()
    for row, token in enumerate(found.tolist()):
        assert not masked[row] or buffers.masks[row, token // 32] >> (token % 32) & 1


def test_rows_do_not_disturb_each_other(samplers: Samplers) -> None:
    sampler = samplers("large")
    rng = np.random.default_rng(0)
    params = [SamplingParams(temperature=1.0), SamplingParams(), SamplingParams(temperature=0.5, top_k=3, repetition_penalty=1.3)] * 8
    tokens = [rng.integers(0, 5000, 20).tolist() for _ in params]
    logits = rng.normal(size=(24, 5000)).astype(np.float32) * 3
    together = sampler.run(step(params, range(24), tokens), logits)
    alone = [int(sampler.run(step([params[i]], [i], [tokens[i]]), logits[i : i + 1])[0]) for i in range(24)]
    assert together.tolist() == alone


def test_padding_ids_are_never_chosen(samplers: Samplers) -> None:
    """A14: the kernels' logits of padding ids are +inf here."""
    sampler = samplers("padded")
    logits = np.zeros((24, 100), np.float32)
    for params in (SamplingParams(temperature=100.0), SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(logit_bias={1: 1.0}),
                   SamplingParams(temperature=1.0, top_k=60, repetition_penalty=1.1)):
        found = sampler.run(step([params] * 24, range(24), [[1, 2, 3]] * 24), logits)
        assert 0 <= found.min() <= found.max() < 100


def test_equal_logits_are_kept_from_the_lowest_id_on(samplers: Samplers) -> None:
    sampler = samplers("tiny")
    logits = np.zeros((1, 8), np.float32)
    for params, kept in ((SamplingParams(temperature=1.0, top_k=3), {0, 1, 2}), (SamplingParams(temperature=1.0, top_p=0.5), {0, 1, 2, 3})):
        drawn = {int(sampler.run(step([params], [seed], [[1]]), logits)[0]) for seed in range(300)}
        assert drawn == kept


def test_greedy_rows_with_filters_that_keep_the_best_are_the_argmax(samplers: Samplers) -> None:
    sampler = samplers("padded")
    logits = np.random.default_rng(1).normal(size=(4, 100)).astype(np.float32)
    found = sampler.run(step([SamplingParams(top_k=1, top_p=0.1, min_p=0.5)] * 4, range(4), [[1]] * 4), logits)
    assert found.tolist() == logits.argmax(-1).tolist()


def test_min_tokens_masks_end_tokens_up_to_the_exact_position(samplers: Samplers) -> None:
    """A6: masked for the first 5 tokens after a prompt of 3, allowed as the sixth."""
    sampler = samplers("tiny")
    logits = np.zeros((1, 8), np.float32)
    logits[0, 3], logits[0, 7] = 9, 8  # the end tokens
    for length in range(3, 12):
        found = sampler.run(step([SamplingParams(min_tokens=5)], [0], [[1] * length]), logits)
        assert found[0] == (0 if length - 3 < 5 else 3)
