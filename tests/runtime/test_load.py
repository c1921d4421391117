"""Load: many requests in a pool that is too small, a third of them aborted; every text is its solo run's, no page is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fake_device import continuation, make_engine
from proposers import LEVELS

from mlsdc.runtime import Engine
from mlsdc.runtime.bench.load import prompts, run_load, solo_runs
from tests.function_level import steady


@pytest.mark.parametrize("level", ["half_right", "random_trees"])
def test_two_thousand_requests_on_the_fake_device(level: str) -> None:
    rng = random.Random(1)
    shared = [rng.randrange(13) for _ in range(24)]
    asked = [[*(shared if i % 2 else ()), *(rng.randrange(13) for _ in range(rng.randint(1, 20)))] for i in range(40)]
    engine = make_engine(LEVELS[level](), num_pages=48)
    report = run_load(engine, asked, [continuation(prompt, 20) for prompt in asked], 2000)
    assert (report.requests, report.wrong, report.leaked_pages) == (2000, 0, 0)
    assert report.aborted > 500
    assert report.preemptions > 100
    assert report.cached_tokens > 1000
    assert report.owned_mean > 0.7
    assert report.owned_max > 0.95


@pytest.mark.model
def test_three_hundred_requests_on_smollm2(smollm2: Path) -> None:
    with Engine.load(smollm2, threads=1, num_pages=20) as engine:
        asked = prompts(steady(engine))[::4]
        report = run_load(engine, asked, solo_runs(engine, asked, 10, 0.8), 300, temperature=0.8)
    assert (report.requests, report.wrong, report.leaked_pages) == (300, 0, 0)
    assert report.preemptions > 0
    assert report.accepted > 0
    assert report.owned_max > 0.9
    assert report.rss_end < report.rss_quarter + 16
