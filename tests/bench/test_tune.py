"""What `mlsdc tune` counts of recorded steps."""

from __future__ import annotations

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlsdc.runtime.bench.tune import Measured, Recorded, accepted, of_levels, play, played_out, rising, sibling_ranks, survival
from mlsdc.runtime.controller import Controller
from mlsdc.runtime.costs import CostTable
from mlsdc.runtime.tree import Tree

NAMES = ("a", "b", "target")
# 5 -> 6 and 7 by level a, 9 by level b beside 5
TREE = Tree((5, 6, 7, 9), (-1, 0, 0, -1), (log(0.5), log(0.6), log(0.2), log(0.3)), (0, 0, 0, 1))
FLAT = CostTable((0,), (1, 32), ((1e-3, 1.1e-3),), {"a": 1e-6, "b": 1e-6})


def step(*committed: int, tree: Tree = TREE, request: int = 0) -> Recorded:
    return Recorded(request, tree, 0, committed, False)


def test_survival_is_counted_by_level_and_depth_while_the_path_is_right() -> None:
    found = {(rate.level, rate.depth): rate for rate in survival([step(5, 7, 1), step(9, 2), step(8)], NAMES)}
    assert (found["a", 1].steps, found["a", 1].hit, found["a", 1].mass) == (3, pytest.approx(1 / 3), pytest.approx(0.5))
    assert (found["b", 1].hit, found["b", 1].mass) == (pytest.approx(1 / 3), pytest.approx(0.3))
    assert (found["a", 2].steps, found["a", 2].hit, found["a", 2].mass) == (1, 1.0, pytest.approx(0.8))
    assert set(found) == {("a", 1), ("b", 1), ("a", 2)}


def test_sibling_ranks_are_of_one_level() -> None:
    ranks = sibling_ranks([step(5, 7), step(5, 6), step(1)], NAMES)
    assert ranks["a"][:2] == (pytest.approx(3 / 5), pytest.approx(1 / 5))
    assert ranks["b"][0] == 0.0


def test_accepted_follows_the_committed_tokens() -> None:
    assert [accepted(TREE, tokens) for tokens in ((5, 7, 1), (5, 1), (9,), (1, 5), ())] == [2, 1, 1, 0, 0]


def test_a_level_alone_loses_what_hung_on_the_other() -> None:
    assert of_levels(TREE, [0]).tokens == (5, 6, 7)
    assert of_levels(TREE, [1]).tokens == (9,)
    assert of_levels(Tree((1, 2), (-1, 0), (0.0, 0.0), (0, 1)), [1]).tokens == ()


def test_played_out_speed_is_tokens_over_the_tables_seconds() -> None:
    steps = [step(5, 6, 1) for _ in range(50)]
    speed = play("x", steps, FLAT, 0.0, 0.0, Controller(Measured(FLAT)))
    assert speed.length == pytest.approx(3.0)
    assert speed.predicted == pytest.approx(3.0 / FLAT.step_s(5, 0), rel=0.05)


def test_a_level_that_brings_nothing_is_dropped_and_one_that_does_is_kept() -> None:
    steps = [step(5, 6, 1, request=i // 20) for i in range(200)]
    speeds, dropped = played_out(steps, FLAT, 0.0, NAMES, tuple(survival(steps, NAMES)))
    assert set(dropped) == {"b"}
    assert "over the others; 5 % is the least that pays" in dropped["b"]
    assert speeds[0].name == "chosen by the controller"
    assert speeds[0].predicted > 2.5 * next(speed for speed in speeds if speed.name == "off").predicted


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_rising_values_rise_and_keep_their_sum(values: list[float]) -> None:
    found = rising(values)
    assert list(found) == sorted(found)
    assert sum(found) == pytest.approx(sum(values))
