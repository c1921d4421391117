"""Heads may propose anything: the text is the target's, whatever they say, and their pages are given back (laws L1, L3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.levels.compose import MergedLevel
from mlsdc.runtime.levels.heads import HeadState
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from tests.function_level import sends_all

OFF = Speculation(enabled=False)
PROMPTS = [[(7 * i * j + 3) % 256 for i in range(5 + 40 * j)] for j in range(1, 5)]


@contextmanager
def engine_with(artifact: Path, *names: str) -> Iterator[Engine]:
    """The engine, drafting with these of its levels only; all of them if none is named."""
    with Engine.load(artifact, threads=1) as engine:
        if names:
            levels = [level for level in engine.drafting.levels if level.name in names]
            engine.drafting.level = levels[0] if len(levels) == 1 else MergedLevel(levels, 15)
        yield sends_all(engine)


@pytest.fixture(scope="module", params=["eagle", "medusa", "counts eagle medusa"])
def engine(request: pytest.FixtureRequest, merged: Path) -> Iterator[Engine]:
    with engine_with(merged, *request.param.split()) as loaded:
        yield loaded


def params(temperature: float, speculation: Speculation | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True, speculation=speculation)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_same_with_heads_and_without(engine: Engine, temperature: float) -> None:
    drafted = engine.generate(PROMPTS, params(temperature))
    plain = engine.generate(PROMPTS, params(temperature, OFF))
    assert sum(result.statistics.drafted for result in drafted) > 100
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]


def test_one_sequence_alone_drafts_the_same_text(engine: Engine) -> None:
    together = engine.generate(PROMPTS, params(0.0))
    assert engine.generate([PROMPTS[1]], params(0.0))[0].token_ids == together[1].token_ids


def test_preemption_between_drafts_changes_nothing(merged: Path) -> None:
    """A pool for about two of four sequences: they are preempted and computed again, heads and all."""
    with engine_with(merged) as engine:
        wanted = [result.token_ids for result in engine.generate(PROMPTS, params(0.0, OFF))]
    with Engine.load(merged, threads=1, num_pages=24) as small:
        results = sends_all(small).generate(PROMPTS, params(0.0))
        small.check_integrity()
    assert sum(result.statistics.preemptions for result in results) > 0
    assert [result.token_ids for result in results] == wanted


def test_all_pages_come_back(engine: Engine) -> None:
    engine.generate(PROMPTS, params(0.0))
    engine.check_integrity()
    level = engine.drafting.level
    assert level is not None
    for part in getattr(level, "levels", (level,)):
        pool = getattr(part, "pool", None)
        if pool is not None:
            pool.check_integrity([])


def test_a_prompt_longer_than_the_window_drafts(merged: Path) -> None:
    with engine_with(merged, "eagle") as engine:
        (result,) = engine.generate([[i % 256 for i in range(300)]], params(0.0))
        assert result.statistics.drafted > 20


def test_heads_go_on_after_a_prefix_was_reused(merged: Path) -> None:
    """The reused positions have no hidden states: the context begins with the first row that was computed."""
    with engine_with(merged, "eagle") as engine:
        prompt = [i % 251 for i in range(120)]
        (first,) = engine.generate([prompt], params(0.0))
        (again,) = engine.generate([prompt], params(0.0))
        assert again.statistics.cached_tokens > 0
        assert again.statistics.drafted > 20
        assert again.token_ids == first.token_ids


def test_the_ring_keeps_the_last_window_of_hidden_states(merged: Path) -> None:
    import numpy as np

    with engine_with(merged, "eagle") as engine:
        level = engine.drafting.level
        assert level is not None
        state = level.start()
        assert isinstance(state, HeadState)
        for first, count in ((0, 50), (50, 30), (80, 1), (81, 7)):
            rows = np.arange(first, first + count, dtype=np.float32)[:, None].repeat(96, 1)
            state.keep(first, [rows, rows + 1000, rows + 2000])
        assert (state.kept_from, state.kept_to) == (88 - 64, 88)
        hidden = state.hidden(30, 88)
        assert np.array_equal(hidden[:, 0], np.arange(30, 88))
        assert np.array_equal(hidden[:, 96], np.arange(1030, 1088))
