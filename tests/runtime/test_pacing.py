"""A long prompt beside decoding sequences: their steps stay short, whatever a row costs."""

from __future__ import annotations

import pytest
from fake_device import VOCAB, continuation, make_engine
from proposers import random_trees

from mlsdc.runtime.errors import CapacityError
from mlsdc.runtime.pacing import TILE, ChunkPacer
from mlsdc.runtime.sampling_params import SamplingParams


@pytest.mark.parametrize("row_s", [0.0001, 0.0005, 0.002])
@pytest.mark.parametrize("growth", [0.0, 0.002])
def test_steps_with_prompt_rows_take_at_most_the_stretch(row_s: float, growth: float) -> None:
    """A simulated machine: 5 ms a step, and rows that cost more with every row before them."""
    pacer, now, done, gaps = ChunkPacer(3.0), 0.0, 0, []
    for _ in range(20):
        pacer.step(now, 0, decoding=True)
        now += 0.005
    while done < 4000:
        rows = pacer.limit(256)
        assert rows % TILE == 0 or rows == 256 or rows < TILE
        pacer.step(now, rows, decoding=True)
        seconds = 0.005 + rows * row_s * (1 + growth * done / 8)
        gaps.append((rows, seconds))
        now += seconds
        done += rows
    late = gaps[8:]
    assert all(seconds <= 3.3 * 0.005 or rows == 1 for rows, seconds in late)
    if growth == 0 and row_s < 0.001:
        assert all(seconds > 2 * 0.005 for _, seconds in late), "no shorter than it must be"


def test_a_small_stretch_does_not_starve_a_prompt_and_a_long_one_takes_less_than_a_tile_of_rows() -> None:
    """Steps of 5 ms, stretch 1.5: a tile is sent while it takes at most TILE_STRETCH steps; then fewer rows, as they get dearer."""
    pacer, now, sent = ChunkPacer(1.5), 0.0, []
    for done in range(0, 4000, 4):
        row_s = 0.0004 + done * 6e-7
        rows = pacer.limit(256)
        for count in (0, rows):
            pacer.step(now, count, decoding=True)
            now += 0.005 + count * row_s
        sent.append((rows, (0.005 + rows * row_s) / 0.005))
    assert all(rows == TILE for rows, _ in sent[20:100])
    assert [rows for rows, _ in sent[20:]] == sorted((rows for rows, _ in sent[20:]), reverse=True)
    assert 1 <= sent[-1][0] < TILE
    assert max(steps for _, steps in sent[20:]) < 2.6


def test_without_a_stretch_nothing_is_limited() -> None:
    pacer = ChunkPacer()
    pacer.step(0.0, 0, decoding=True)
    pacer.step(1.0, 100, decoding=True)
    pacer.step(9.0, 100, decoding=True)
    assert pacer.limit(256) == 256


def test_a_hiccup_does_not_move_the_pace_far() -> None:
    pacer, now = ChunkPacer(3.0), 0.0
    for i in range(40):
        pacer.step(now, 16 if i % 2 else 0, decoding=True)
        now += 0.005 + (0.008 if i % 2 else 0.0)
    before = pacer.limit(256)
    pacer.step(now, 0, decoding=True)
    pacer.step(now + 5.0, 0, decoding=True)
    assert TILE <= pacer.limit(256) <= 2 * before


def test_prompt_rows_that_seemed_free_once_are_priced_when_they_are_not() -> None:
    """The first chunk is seen beside a plain step that was slow, so that its rows cost nothing; each costs a fifth of a plain step."""
    pacer, now = ChunkPacer(3.0), 0.0
    for i in range(40):
        rows = pacer.limit(256) if i % 2 else 0
        pacer.step(now, rows, decoding=True)
        now += 1.0 if i == 0 else 0.005 + 0.001 * rows
    assert pacer.limit(256) == TILE


def test_the_time_in_which_nobody_asks_is_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first request of two tokens, then nothing for an hour; clocks tell 5 ms a step."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.005
        return now

    monkeypatch.setattr("mlsdc.runtime.scheduler.time.perf_counter", clock)
    with make_engine(None) as engine:
        engine.scheduler.restrict(max_stretch=1.5)
        engine.generate([[1, 2]], SamplingParams(max_tokens=2))
        now += 3600
        engine.generate([[1, 2]], SamplingParams(max_tokens=20))
        plain_s = engine.scheduler.pacer._plain_s
    assert plain_s is not None
    assert plain_s < 1


def test_longer_steps_with_drafts_do_not_make_chunks_longer() -> None:
    """A plain step takes 5 ms, one with nodes 7, a prompt row 0.5; every fourth step is plain, and prompts come beside some of both."""
    limits = []
    for drafts in (False, True):
        pacer, now = ChunkPacer(3.0), 0.0
        last = False
        for i in range(400):
            rows, nodes = pacer.limit(256) if i % 5 == 0 else 0, drafts and i % 4 > 0
            pacer.step(now, rows, decoding=True, drafted=last)
            now += (0.007 if nodes else 0.005) + 0.0005 * rows
            last = nodes
        limits.append(pacer.limit(256))
    assert limits == [16, 16]


def test_nothing_is_drafted_beside_the_chunks_of_a_prompt() -> None:
    with make_engine(random_trees(0), max_model_len=400, num_pages=600, max_num_batched_tokens=64) as engine:
        engine.scheduler.restrict(max_stretch=1.5)
        short = engine.submit([1, 2], SamplingParams(max_tokens=300))
        while not short.statistics.drafted:
            engine.step()
        before, tokens = short.statistics.drafted, short.num_output
        long = engine.submit([3] * 300, SamplingParams(max_tokens=2))
        steps = 0
        while not long.num_output:
            engine.step()
            steps += 1
        assert steps > 3
        assert short.statistics.drafted == before
        assert short.num_output == tokens + steps
        assert engine.wait(short).token_ids == continuation([1, 2], 300)
        assert short.statistics.drafted > before


def test_decoding_goes_on_while_a_long_prompt_comes_in_chunks_and_texts_do_not_change() -> None:
    """B11: each step that computes prompt rows gives every decoding sequence its token."""
    with make_engine(None, max_model_len=400, num_pages=600, max_num_batched_tokens=64) as engine:
        engine.scheduler.restrict(max_stretch=3.0)
        short = engine.submit([1, 2], SamplingParams(max_tokens=90))
        for _ in range(3):
            engine.step()
        long = engine.submit([i % VOCAB for i in range(300)], SamplingParams(max_tokens=5))
        before = short.num_output
        steps = 0
        while not long.num_output:
            engine.step()
            steps += 1
        assert short.num_output == before + steps
        assert steps >= 5
        engine.wait(long)
        engine.wait(short)
        assert short.output == continuation([1, 2], 90)
        assert long.output == continuation([i % VOCAB for i in range(300)], 5)


def test_a_stretch_below_one_is_refused() -> None:
    with make_engine(None) as engine, pytest.raises(CapacityError, match="max_stretch: 0.5, expected at least 1"):
        engine.scheduler.restrict(max_stretch=0.5)
