"""Law L1 through the engine: a sampled text depends on prompt, parameters and seed only, whatever is drafted, batched or preempted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_device import VOCAB, choose, logits_of, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from proposers import LEVELS, FunctionLevel, random_trees

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.request import Result
from mlsdc.runtime.sampling.noise import choice_seed
from mlsdc.runtime.sampling.oracle import logprobs
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from mlsdc.runtime.tree import EMPTY, Tree, chain

PROMPTS = [[1], [2, 3], [5, 1, 4, 2, 2], [7] * 9, [0, 12, 3], [6, 6, 1, 11], [3] * 20, [8, 9, 10, 11, 12, 0, 1]]
HOT = SamplingParams(temperature=1.0, seed=42, max_tokens=30)
FILTERED = SamplingParams(temperature=0.9, top_k=9, top_p=0.95, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.3,
                          presence_penalty=0.2, logit_bias={4: 1.5, 2: -100.0}, min_tokens=6, stop_token_ids=(5, 8), seed=7, max_tokens=30)
PENALISED = SamplingParams(repetition_penalty=1.3, frequency_penalty=1.0, max_tokens=30)
PARAMS = {"hot": HOT, "filtered": FILTERED, "penalised": PENALISED}


def cut_by_looking_ahead(history: list[int], budget: int) -> Tree:
    """A controller that cuts drafts by what it drafted: only even first tokens are sent."""
    token = (3 * history[-1]) % VOCAB
    return chain([token, (token + 1) % VOCAB][:budget]) if token % 2 == 0 else EMPTY


DRAFTERS: dict[str, Any] = {**LEVELS, "cut": lambda: FunctionLevel(cut_by_looking_ahead)}


def alone(prompt: list[int], params: SamplingParams, level: Level | None = None, **options: Any) -> Result:
    with make_engine(level, **options) as engine:
        (result,) = engine.generate([prompt], params)
        engine.check_integrity()
    return result


@pytest.fixture(scope="module")
def plain() -> dict[str, list[list[int]]]:
    return {name: [alone(prompt, params).token_ids for prompt in PROMPTS] for name, params in PARAMS.items()}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_of_any_kind_leave_the_text(plain: dict[str, list[list[int]]], name: str, drafter: str) -> None:
    with make_engine(DRAFTERS[drafter](), max_num_seqs=3) as engine:  # few enough that there is room for drafts
        results = engine.generate(PROMPTS, PARAMS[name])
    assert [result.token_ids for result in results] == plain[name]


@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 5, 8, 16])
def test_any_number_of_drafts_leaves_the_text(plain: dict[str, list[list[int]]], drafts: int) -> None:
    with make_engine(random_trees(drafts), max_num_seqs=2) as engine:
        for name, params in PARAMS.items():
            speculation = Speculation(max_draft_tokens=drafts)
            results = engine.generate(PROMPTS, [SamplingParams(**{**vars(params), "speculation": speculation})] * len(PROMPTS))
            assert [result.token_ids for result in results] == plain[name]


def test_sampled_drafts_are_accepted() -> None:
    with make_engine(random_trees(1)) as engine:
        results = engine.generate(PROMPTS[:3], HOT)
    assert sum(result.statistics.accepted for result in results) > 10


@settings(max_examples=25)
@given(st.integers(0, 1 << 30), st.integers(14, 60), st.integers(2, 40), st.integers(1, 8))
def test_small_pools_batches_and_chunks_leave_the_text(seed: int, pages: int, rows: int, seqs: int) -> None:
    """Preemption, chunked prompts and any batch."""
    rng = np.random.default_rng(seed)
    params = [SamplingParams(**{**vars(PARAMS[name]), "seed": int(rng.integers(100))}) for name in rng.choice(list(PARAMS), len(PROMPTS))]
    limits = {"max_num_batched_tokens": rows, "max_num_seqs": seqs, "max_logit_rows": rows}
    with make_engine(random_trees(seed), num_pages=pages + 5, **limits) as engine:
        try:
            results = engine.generate(PROMPTS, params)
        except RequestError:
            return  # the pool could never hold one of them
        engine.check_integrity()
    with make_engine(max_num_seqs=1) as engine:
        expected = [engine.generate([prompt], own)[0].token_ids for prompt, own in zip(PROMPTS, params, strict=True)]
    assert [result.token_ids for result in results] == expected


def test_seeded_and_unseeded_neighbours_do_not_disturb_each_other() -> None:
    """A3, A4: every row is its own batch of one, with the seed it reports."""
    seeds = [7, None, 9, None, None, 7, (1 << 64) - 1, -3]
    params = [SamplingParams(temperature=2.0 if i % 2 else 0.1, seed=seed, max_tokens=20) for i, seed in enumerate(seeds)]
    with make_engine(random_trees(3), num_pages=40) as engine:
        results = engine.generate(PROMPTS, params)
    for prompt, own, result in zip(PROMPTS, params, results, strict=True):
        again = SamplingParams(**{**vars(own), "seed": result.seed})
        assert alone(prompt, again).token_ids == result.token_ids


def test_a_request_without_a_seed_draws_one_and_reports_it() -> None:
    with make_engine() as engine:
        results = engine.generate([[1, 2]] * 4, SamplingParams(temperature=1.0, max_tokens=30))
    assert len({result.seed for result in results}) == 4
    assert len({tuple(result.token_ids) for result in results}) == 4


def test_one_seed_gives_one_text_at_different_seeds_different_ones() -> None:
    texts = [alone([1, 2], SamplingParams(temperature=1.0, seed=seed, max_tokens=30)).token_ids for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("drafter", [None, "oracle", "random_trees"])
def test_a_token_that_is_biased_away_never_appears(drafter: str | None) -> None:
    """A5: neither as a draft nor as the choice after one."""
    banned = choose([1, 2, 3])
    with make_engine(DRAFTERS[drafter]() if drafter else None) as engine:
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, logit_bias={banned: -100.0}, max_tokens=40, seed=1)
            results = engine.generate([[1, 2, 3], [4], [5, 6]], params)
            assert all(banned not in result.token_ids for result in results)


@pytest.mark.parametrize("drafter", [None, "oracle", "half_right"])
def test_min_tokens_keeps_end_tokens_away_until_then_and_drafting_goes_on(drafter: str | None) -> None:
    """A6."""
    stops = tuple(range(0, VOCAB, 2))
    params = SamplingParams(stop_token_ids=stops, min_tokens=8, max_tokens=40)
    with make_engine(DRAFTERS[drafter]() if drafter else None) as engine:
        (result,) = engine.generate([[1, 2, 3]], params)
    assert not set(result.token_ids[:8]) & set(stops)
    assert len(result.token_ids) >= 9
    assert result.token_ids == alone([1, 2, 3], params).token_ids
    assert drafter is None or result.statistics.drafted > 0


@pytest.mark.parametrize("drafter", [None, "oracle", "random_trees", "ngram_tree"])
@pytest.mark.parametrize("count", [0, 5])
def test_each_token_has_its_raw_log_probabilities(drafter: str | None, count: int) -> None:
    """A12: one entry a token, of the raw model, filters or not."""
    params = SamplingParams(temperature=1.0, seed=3, logprobs=count, top_k=4, repetition_penalty=1.2, max_tokens=25)
    with make_engine(DRAFTERS[drafter]() if drafter else None) as engine:
        results = engine.generate(PROMPTS, params)
        deltas = list(engine.stream(PROMPTS[2], params))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.logprobs is not None
        assert [entry.token_id for entry in result.logprobs] == result.token_ids
        for i, entry in enumerate(result.logprobs):
            ids, values = logprobs(logits_of([*prompt, *result.token_ids[:i]])[:VOCAB], entry.token_id, count)
            assert [entry.token_id, *(token for token, _ in entry.top)] == ids
            assert [entry.logprob, *(value for _, value in entry.top)] == pytest.approx(values, abs=1e-5)
    assert [entry for delta in deltas for entry in delta.logprobs or ()] == results[2].logprobs


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5, "max_logit_rows": 5}, {"num_pages": 22}, {"max_logit_rows": 3}])
def test_each_prompt_token_has_its_raw_log_probabilities(options: dict[str, int]) -> None:
    params = SamplingParams(prompt_logprobs=2, logprobs=1, max_tokens=10)
    with make_engine(random_trees(5), **options) as engine:
        engine.generate(PROMPTS, SamplingParams(max_tokens=4))  # their pages are known now
        results = engine.generate(PROMPTS, params)
        engine.check_integrity()
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.prompt_logprobs is not None
        assert [entry.token_id for entry in result.prompt_logprobs] == prompt[1:]
        for i, entry in enumerate(result.prompt_logprobs):
            ids, values = logprobs(logits_of(prompt[: i + 1])[:VOCAB], prompt[i + 1], 2)
            assert [entry.token_id, *(token for token, _ in entry.top)] == ids
            assert [entry.logprob, *(value for _, value in entry.top)] == pytest.approx(values, abs=1e-5)
        assert result.token_ids == alone(prompt, SamplingParams(max_tokens=10)).token_ids


def test_what_is_not_asked_for_is_not_reported() -> None:
    result = alone([1, 2], HOT)
    assert result.logprobs is result.prompt_logprobs is None


@pytest.mark.parametrize("drafter", [None, "random_trees"])
def test_choice_i_of_n_is_a_request_with_its_own_seed(drafter: str | None) -> None:
    params = SamplingParams(temperature=1.0, seed=11, n=4, max_tokens=20, repetition_penalty=1.1)
    with make_engine(DRAFTERS[drafter]() if drafter else None, num_pages=60) as engine:
        (result,) = engine.generate([PROMPTS[3]], params)
        engine.check_integrity()
    texts = [result.token_ids, *(other.token_ids for other in result.others)]
    single = [SamplingParams(**{**vars(params), "n": 1, "seed": choice_seed(11, i)}) for i in range(4)]
    assert texts == [alone(PROMPTS[3], own).token_ids for own in single]
    assert len(set(map(tuple, texts))) == 4


def test_greedy_steps_do_not_run_the_sampling_program() -> None:
    """Law L4: what nobody asked for costs nothing."""
    engine = make_engine(LEVELS["ngram_tree"]())
    engine.generate(PROMPTS, SamplingParams(max_tokens=20, top_k=3, top_p=0.5, min_p=0.1))
    assert _runs(engine) == 0
    engine.generate([[1]], HOT)
    assert _runs(engine) > 0


def _runs(engine: Engine) -> int:
    return engine._memory.programs["sample"].runs  # type: ignore[attr-defined, no-any-return]
