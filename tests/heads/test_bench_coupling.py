"""What `mlsdc bench spec --coupling` counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlsdc.runtime.bench.coupling import LevelCoupling, as_chosen, measure
from mlsdc.runtime.bench.prompts import BenchPrompt
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.sampling_params import SamplingParams


def test_a_turn_counts_the_overlap_of_both_distributions() -> None:
    found = LevelCoupling("x")
    p = np.array([0.5, 0.3, 0.2], np.float32)
    found.count(p, np.array([2, 0]), np.array([0.6, 0.3]), first=2, choice=2)  # min: 0.2 + 0.3
    found.count(p, np.array([2, 0]), np.array([0.6, 0.3]), first=0, choice=2)
    assert found.overlap == pytest.approx(1.0)
    assert found.least == pytest.approx(2 * 0.5 / 1.5)
    assert (found.turns, found.right, found.likeliest) == (2, 1, pytest.approx(0.4))


def test_the_targets_distribution_is_the_one_that_is_drawn_from() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert as_chosen(logits, SamplingParams(temperature=1.0)) == pytest.approx([0.5, 0.3, 0.15, 0.05])
    assert as_chosen(logits, SamplingParams(temperature=1.0, top_k=2)) == pytest.approx([0.625, 0.375, 0, 0])
    hot = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    assert as_chosen(logits, SamplingParams(temperature=0.5)) == pytest.approx(hot / hot.sum(), rel=1e-5)


@pytest.fixture(scope="module")
def engine(merged: Path) -> Iterator[Engine]:
    with Engine.load(merged, threads=1) as loaded:
        yield loaded


def test_every_level_is_looked_at_where_tokens_are_drawn(engine: Engine) -> None:
    prompts = [BenchPrompt("all", [(7 * i + 3) % 256 for i in range(20)]), BenchPrompt("all", [1, 2, 3, 1, 2, 3, 1, 2])]
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
    found = {level.level: level for level in measure(engine, prompts, params)}
    assert engine.statistics.drafted == 0
    assert set(found) == {"counts", "eagle", "medusa"}
    assert found["eagle"].turns == found["medusa"].turns == 2 * 10  # all but the prompt's own and the last, which ends the text anyway
    for level in found.values():
        assert 0 <= level.least <= level.overlap <= level.turns


def test_at_temperature_zero_there_is_nothing_to_look_at(engine: Engine) -> None:
    with pytest.raises(MlsdcError, match="--coupling: at temperature 0 nothing is drawn"):
        measure(engine, [BenchPrompt("all", [1, 2])], SamplingParams())
