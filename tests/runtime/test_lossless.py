"""Law L1 at temperature 0: the text is the target's, whatever drafts, batches and pools do."""

from __future__ import annotations

import itertools
import random

import pytest
from fake_device import VOCAB, continuation, make_engine
from proposers import LEVELS, random_trees

from mlsdc.runtime.controller import Controller
from mlsdc.runtime.sampling_params import SamplingParams, Speculation


def prompts_of(seed: int, count: int, longest: int = 30) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("drafts", range(1, 9))
def test_text_is_the_targets_for_every_drafter_and_k(name: str, drafts: int) -> None:
    prompts = prompts_of(drafts, 5)
    engine = make_engine(LEVELS[name](), drafts=drafts)
    results = engine.generate(prompts, SamplingParams(max_tokens=30))
    assert [r.token_ids for r in results] == [continuation(p, 30) for p in prompts]
    engine.check_integrity()


def test_text_is_the_same_alone_in_a_batch_and_without_speculation() -> None:
    prompts = prompts_of(3, 6)
    params = SamplingParams(max_tokens=25)
    off = SamplingParams(max_tokens=25, speculation=Speculation(enabled=False))
    together = make_engine(random_trees(1)).generate(prompts, params)
    alone = [make_engine(random_trees(1)).generate([p], params)[0] for p in prompts]
    plain = make_engine(random_trees(1)).generate(prompts, off)
    assert [r.token_ids for r in together] == [r.token_ids for r in alone] == [r.token_ids for r in plain]
    assert all(r.statistics.drafted == 0 for r in plain)
    assert sum(r.statistics.accepted for r in together) > 0


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("spare", [0, 1, 3, 10])
def test_text_survives_preemption_in_a_pool_that_is_nearly_full(page_size: int, spare: int) -> None:
    prompts = prompts_of(page_size, 8, longest=20)
    largest = -(-60 // page_size) + -(-17 // page_size)
    engine = make_engine(random_trees(2), page_size=page_size, num_pages=largest + spare)
    results = engine.generate(prompts, SamplingParams(max_tokens=40))
    assert [r.token_ids for r in results] == [continuation(p, 40) for p in prompts]
    engine.check_integrity()


def test_preemption_happens_in_such_a_pool() -> None:
    engine = make_engine(random_trees(2), page_size=4, num_pages=40)
    results = engine.generate(prompts_of(4, 8, longest=20), SamplingParams(max_tokens=40))
    assert sum(r.statistics.preemptions for r in results) > 0


@pytest.mark.parametrize("batched", [3, 5, 8, 17, 64])
def test_text_does_not_depend_on_how_prompts_are_chunked(batched: int) -> None:
    prompts = prompts_of(7, 6, longest=50)
    engine = make_engine(random_trees(3), max_num_batched_tokens=batched, max_logit_rows=min(batched, 6))
    results = engine.generate(prompts, SamplingParams(max_tokens=20))
    assert [r.token_ids for r in results] == [continuation(p, 20) for p in prompts]


def test_a_step_never_exceeds_its_limits_and_batches_many_sequences() -> None:
    engine = make_engine(random_trees(3))
    engine.generate(prompts_of(9, 30), SamplingParams(max_tokens=20))
    rows = engine._memory.rows_run  # type: ignore[attr-defined]
    assert max(rows) == engine.manifest.limits.max_num_batched_tokens


@pytest.mark.parametrize("name", LEVELS)
def test_whatever_the_controller_cuts_the_text_is_the_targets(name: str) -> None:
    """Times that jump about make it send all, some or nothing from step to step."""
    rng = random.Random(name)
    times = itertools.accumulate(rng.choice((1e-5, 1e-3, 0.05)) for _ in itertools.count())
    engine = make_engine(LEVELS[name]())
    engine.drafting.controller = Controller()
    engine.drafting.clock = lambda: next(times)
    prompts = prompts_of(5, 6)
    results = engine.generate(prompts, SamplingParams(max_tokens=60))
    assert [result.token_ids for result in results] == [continuation(prompt, 60) for prompt in prompts]
    engine.check_integrity()


def test_an_accepting_draft_takes_fewer_steps() -> None:
    prompt = [1, 2, 3]
    params = SamplingParams(max_tokens=40)
    (drafted,) = make_engine(LEVELS["oracle"](), drafts=7).generate([prompt], params)
    assert drafted.statistics.steps == 5  # the prompt's own choice, then 39 tokens, eight a step
    assert drafted.statistics.acceptance_rate == 1.0


def test_speculation_settings_of_one_request_leave_its_neighbours_alone() -> None:
    prompts = prompts_of(11, 3)
    each = [SamplingParams(max_tokens=20, speculation=s) for s in (None, Speculation(enabled=False), Speculation(max_draft_tokens=2))]
    results = make_engine(LEVELS["oracle"]()).generate(prompts, each)
    assert [r.token_ids for r in results] == [continuation(p, 20) for p in prompts]
    assert [bool(r.statistics.drafted) for r in results] == [True, False, True]
    assert len(results[2].statistics.levels["draft"].depths) == 2


@pytest.mark.parametrize("seed", range(4))
def test_hundreds_of_mixed_requests_equal_their_solo_runs(seed: int) -> None:
    rng = random.Random(seed)
    prompts = prompts_of(seed, 500, longest=24)
    each = [
        SamplingParams(max_tokens=rng.randint(1, 20), speculation=Speculation(enabled=rng.random() < 0.8)) for _ in prompts
    ]
    engine = make_engine(random_trees(seed) if seed % 2 else LEVELS["ngram_tree"](), num_pages=45, page_size=4)
    results = engine.generate(prompts, each)
    for prompt, params, result in zip(prompts, each, results, strict=True):
        assert params.max_tokens is not None
        assert result.token_ids == continuation(prompt, params.max_tokens)
    engine.check_integrity()
    assert engine.pool.num_available == engine.pool.num_pages
