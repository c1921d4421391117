"""Levels that a plan file drops are left out of the cascade, whatever way they were composed; the text is the same (law L1)."""

from __future__ import annotations

import pytest
from fake_device import continuation
from test_some_levels import ENGINES, MERGED, NAMES, engine_of, oracle

from mlsdc.runtime.costs import CostTable
from mlsdc.runtime.plan_file import PlanFile
from mlsdc.runtime.sampling_params import SamplingParams
from tests.function_level import FunctionLevel, sends_all

DROPS: list[tuple[str, ...]] = [("low",), ("mid",), ("high",), ("low", "high"), NAMES]


def plan(dropped: tuple[str, ...]) -> PlanFile:
    costs = CostTable((0,), (1,), ((1e-3,),), {})
    return PlanFile("", "", costs, 0.0, (), (), dict.fromkeys(dropped, "brings 0.4 % over the others; 5 % is the least that pays"))


@pytest.mark.parametrize("dropped", DROPS)
@pytest.mark.parametrize("how", ENGINES)
def test_the_others_draft_and_the_text_is_the_same(how: str, dropped: tuple[str, ...]) -> None:
    kind, given = ENGINES[how]
    with engine_of([kind(oracle(i, 3 + i), name) for i, name in enumerate(NAMES)], given) as engine:
        engine.drafting.take(plan(dropped), "x.plan.json")
        assert engine.drafting.plan_note == f"x.plan.json; left out: {', '.join(dropped)}"
        (result,) = engine.generate([[5, 9, 3]], SamplingParams(max_tokens=30))
        sends_all(engine)
        (all_sent,) = engine.generate([[5, 9, 3]], SamplingParams(max_tokens=30))
        engine.check_integrity()
    assert result.token_ids == all_sent.token_ids == continuation([5, 9, 3], 30)
    drafted = {name for name, level in all_sent.statistics.levels.items() if level.drafted}
    assert drafted <= set(NAMES) - set(dropped)
    assert bool(drafted) == (dropped != NAMES)


def test_another_plan_brings_them_back() -> None:
    with engine_of([FunctionLevel(oracle(i, 3), name) for i, name in enumerate(NAMES[:2])], [MERGED, MERGED]) as engine:
        engine.drafting.take(plan(("low",)), "x")
        assert engine.drafting.level is engine.drafting.levels[1]
        engine.drafting.take(None, "shipped default")
        assert engine.drafting.plan_note == "shipped default"
        assert engine.drafting.level is not None
        assert engine.drafting.level.name == "low+mid"
