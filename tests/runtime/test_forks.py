"""`n` choices of one prompt: its rows are computed once, its pages shared, and every choice is what it would have been alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_device import VOCAB, choose, continuation, make_engine
from proposers import LEVELS, random_trees

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.request import Request, StepItem
from mlsdc.runtime.sampling_params import SamplingParams


def diverge(engine: Engine) -> None:
    """Make choice i of a prompt end its first token's choice i further in the vocabulary, so that forks write different bytes."""
    forward = engine._forward.run
    items: list[StepItem] = []
    schedule = engine.scheduler.schedule

    def scheduled() -> list[StepItem]:
        items[:] = schedule()
        return items

    def run() -> None:
        forward()
        for item in items:
            if item.out >= 0 and item.request.num_output == 0:
                choices = engine._memory.buffers.choices
                choices[item.out] = (choices[item.out] + item.request.choice) % VOCAB

    engine.scheduler.schedule = scheduled  # type: ignore[method-assign]
    engine._forward.run = run  # type: ignore[method-assign]


def expected(prompt: list[int], choice: int, count: int) -> list[int]:
    first = (choose(prompt) + choice) % VOCAB
    return [first, *continuation([*prompt, first], count - 1)]


def check(request: Request, prompt: list[int]) -> None:
    for choice in request.choices:
        assert choice.output == expected(prompt, choice.choice, max(1, choice.num_output))[: choice.num_output]


@pytest.mark.parametrize("level", [None, *LEVELS])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 16, 19])
def test_every_choice_is_its_own_continuation(level: str | None, page_size: int, length: int) -> None:
    engine = make_engine(LEVELS[level]() if level else None, page_size=page_size)
    diverge(engine)
    prompt = [i * i % VOCAB for i in range(length)]
    (result,) = engine.generate([prompt], SamplingParams(n=4, max_tokens=25))
    texts = [result.token_ids, *(other.token_ids for other in result.others)]
    assert texts == [expected(prompt, i, 25) for i in range(4)]
    engine.check_integrity()
    assert engine.pool.num_available == engine.pool.num_pages


def test_the_prompt_is_computed_once() -> None:
    engine = make_engine(page_size=4)
    (result,) = engine.generate([[i % VOCAB for i in range(30)]], SamplingParams(n=5, max_tokens=5))
    assert result.statistics.prefill_rows == 30
    assert [other.statistics.cached_tokens for other in result.others] == [29] * 4
    assert [other.statistics.prefill_rows for other in result.others] == [1] * 4


def test_forks_share_pages_while_they_run() -> None:
    engine = make_engine(page_size=4, max_num_seqs=8)
    request = engine.submit([i % VOCAB for i in range(32)], SamplingParams(n=8, max_tokens=4))
    for _ in range(3):
        engine.step()
        engine.check_integrity()
    tables = [choice.table for choice in request.choices]
    assert all(table.pages[:7] == tables[0].pages[:7] for table in tables)
    assert engine.pool.num_pages - engine.pool.num_available == 7 + 8 * 2
    engine.wait(request)


def test_a_stream_says_which_choice_a_delta_is_of() -> None:
    engine = make_engine(random_trees(0))
    diverge(engine)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for delta in engine.stream([1, 2, 3], SamplingParams(n=3, max_tokens=20)):
        seen[delta.choice] += delta.token_ids
    assert seen == {i: expected([1, 2, 3], i, 20) for i in range(3)}


def test_forks_beyond_the_batch_wait_and_follow() -> None:
    engine = make_engine(random_trees(0), max_num_seqs=2)
    diverge(engine)
    (result,) = engine.generate([[1, 2, 3]], SamplingParams(n=9, max_tokens=10))
    assert [other.token_ids for other in result.others] == [expected([1, 2, 3], i, 10) for i in range(1, 9)]


def test_aborting_a_request_ends_its_choices() -> None:
    engine = make_engine(max_num_seqs=3)
    request = engine.submit([1, 2, 3], SamplingParams(n=6, max_tokens=50))
    for _ in range(4):
        engine.step()
    engine.abort(request)
    assert {choice.finish_reason for choice in request.choices} == {"abort"}
    assert engine.pool.num_available == engine.pool.num_pages
    assert not engine.step()


def test_aborting_before_the_prompt_is_computed_ends_the_choices_too() -> None:
    engine = make_engine()
    request = engine.submit([1, 2, 3], SamplingParams(n=3))
    engine.abort(request)
    assert [choice.finish_reason for choice in request.choices] == ["abort"] * 3
    assert not engine.step()


def test_one_choice_can_be_aborted_alone() -> None:
    engine = make_engine()
    request = engine.submit([1, 2, 3], SamplingParams(n=3, max_tokens=8))
    engine.abort(request.choices[1])
    result = engine.wait(request)
    assert [result.finish_reason, *(other.finish_reason for other in result.others)] == ["length", "abort", "length"]


@pytest.mark.parametrize("n", [0, -1, 129, 1.5, True, 1 << 70])
def test_bad_counts_of_choices_are_refused(n: Any) -> None:
    with pytest.raises(RequestError, match="n: "):
        SamplingParams(n=n)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_submits_forks_drafts_aborts_and_preemptions_keep_every_page_accounted_for(page_size: int) -> None:
    """FIELD D5: free + cached + owned = total at every step, one owner per unshared page, every text the choice's own."""
    rng = random.Random(page_size)
    engine = make_engine(random_trees(page_size), page_size=page_size, num_pages=160 // page_size + 5 * (16 // page_size + 1))
    diverge(engine)
    requests: list[tuple[Request, list[int]]] = []
    preempted = 0
    for _ in range(300):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(n=rng.choice((1, 1, 2, 4)), max_tokens=rng.randint(1, 30))
        requests.append((engine.submit(prompt, params, priority=rng.randint(0, 1)), prompt))
        for _ in range(rng.randint(0, 6)):
            engine.step()
            engine.check_integrity()
            for running in engine.scheduler.running:
                if running.decoding:  # room for the token that comes next, and the rest of its page
                    assert len(running.table.pages) <= -(-(len(running.tokens) + 1) // page_size)
        if rng.random() < 0.3:
            request, _ = rng.choice(requests)
            engine.abort(rng.choice(request.choices))
    while engine.step():
        engine.check_integrity()
    for request, prompt in requests:
        check(request, prompt)
        assert {choice.finish_reason for choice in request.choices} <= {"length", "abort"}
        preempted += sum(choice.statistics.preemptions for choice in request.choices)
    assert preempted > 0
    assert engine.pool.num_available == engine.pool.num_pages
