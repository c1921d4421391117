"""What `mlsdc tune` counts of recorded steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlsdc.runtime.bench.replayed import (
    CHOSEN,
    DraftCost,
    Measured,
    Recorded,
    SendBest,
    Texts,
    Times,
    accepted,
    play,
    played_out,
    sibling_ranks,
    smaller,
    survival,
)
from mlsdc.runtime.bench.tune import rising, whole_steps
from mlsdc.runtime.controller import Controller
from mlsdc.runtime.costs import CostTable
from mlsdc.runtime.tree import Tree

NAMES = ("a", "b", "target")
# 5 -> 6 and 7 by level a, 9 by level b beside 5
TREE = Tree((5, 6, 7, 9), (-1, 0, 0, -1), (log(0.5), log(0.6), log(0.2), log(0.3)), (0, 0, 0, 1))
FLAT = CostTable((0,), (1, 32), ((1e-3, 1.1e-3),), {"a": 1e-6, "b": 1e-6})


def step(*following: int, tree: Tree = TREE, request: int = 0) -> Recorded:
    return Recorded(request, tree, 0, following, False)


def text(count: int, right: Tree = TREE, request: int = 0) -> list[Recorded]:
    """`count` positions of a text of 5 and 6 in turn: what is proposed before a 5 is `right`, before a 6 nothing."""
    return [Recorded(request, Tree() if i % 2 else right, 0, tuple((5, 6)[(i + k) % 2] for k in range(8)), False) for i in range(count)]


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


def test_a_smaller_tree_is_of_the_likeliest_paths() -> None:
    assert smaller(TREE, 4) is TREE
    assert smaller(TREE, 3).tokens == (5, 6, 9)  # 0.5, 0.3, 0.3; 7 is 0.1
    assert smaller(TREE, 1).tokens == (5,)


def test_a_draft_costs_what_the_next_measured_size_does() -> None:
    cost = DraftCost((2, 8, 64), (1.0, 2.0, 3.0))
    assert [cost.of(nodes) for nodes in (1, 2, 3, 8, 9, 64, 99)] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0]


def test_played_out_speed_is_tokens_over_the_tables_seconds() -> None:
    steps = [step(5, 6, 1) for _ in range(150)]
    speed = play("x", Texts(steps), Times(FLAT), Controller(Measured(FLAT)))
    assert speed.length == pytest.approx(3.0)
    assert speed.predicted == pytest.approx(3.0 / FLAT.step_s(5, 0), rel=0.05)


def test_a_text_is_gone_through_as_an_engine_would() -> None:
    """Two accepted nodes and the target's own token are one step; where nothing is proposed, or only a 7, a step brings one token."""
    lines = Times(CostTable((0,), (1, 32), ((1.0, 1.0),), {}), choose_s=1.0)
    speed = play("x", Texts(text(12), DraftCost((64,), (0.5,))), lines, SendBest(4), lines.choose_s)
    assert speed.length == 2.0  # positions 0, 3, 4, 7, 8, 11: those that are odd have no tree
    assert play("x", Texts(text(12, Tree((7,), (-1,)))), lines, SendBest(4)).length == 1.0
    assert speed.predicted == pytest.approx(speed.length / 2.5)


def test_sampled_texts_say_nothing_of_greedy_speed() -> None:
    greedy = [step(5, 6, 1) for _ in range(30)]
    sampled = [Recorded(9, TREE, 0, (1, 1, 1), True) for _ in range(30)]
    best = SendBest(4)
    assert play("x", Texts([*greedy, *sampled]), Times(FLAT), best) == play("x", Texts(greedy), Times(FLAT), best)


B_ALONE = Tree((9,), (-1,), (log(0.3),), (1,))
A_ALONE = Tree(TREE.tokens[:3], TREE.parents[:3], TREE.logq[:3], TREE.levels[:3])


def proposals(trees: dict[tuple[str, ...], Tree], cost: dict[tuple[str, ...], float]) -> Callable[[Sequence[str]], Texts]:
    return lambda levels: Texts([step(5, 6, 1, request=i // 20, tree=trees[tuple(levels)]) for i in range(600)],
                                DraftCost((64,), (cost[tuple(levels)],)))


def test_a_level_that_brings_nothing_is_dropped_and_one_that_does_is_kept() -> None:
    texts = proposals({("a", "b"): TREE, ("a",): A_ALONE, ("b",): B_ALONE}, {("a", "b"): 2e-6, ("a",): 1e-6, ("b",): 1e-6})
    speeds, dropped = played_out(NAMES[:2], texts, Times(FLAT), NAMES)
    assert set(dropped) == {"b"}
    assert "over the others; 5 % is the least that pays" in dropped["b"]
    assert speeds[0].name == CHOSEN
    assert speeds[0].predicted > 2.5 * next(speed for speed in speeds if speed.name == "off").predicted


def test_a_level_whose_trees_hide_those_of_the_level_below_is_judged_by_what_that_proposes_alone() -> None:
    """Stacked, every node is b's: a alone proposes as well, and b takes two steps' time."""
    of_b = Tree(TREE.tokens[:3], TREE.parents[:3], TREE.logq[:3], (1, 1, 1))
    texts = proposals({("a", "b"): of_b, ("a",): A_ALONE, ("b",): of_b}, {("a", "b"): 2e-3, ("a",): 1e-6, ("b",): 2e-3})
    speeds, dropped = played_out(NAMES[:2], texts, Times(FLAT), NAMES)
    assert set(dropped) == {"b"}
    assert speeds[0].predicted == pytest.approx(play("x", texts(("a",)), Times(FLAT), Controller(Measured(FLAT))).predicted, rel=0.05)
    again, settled = played_out(NAMES[:2], texts, Times(FLAT), NAMES, {"a": "for no reason", "b": "too dear"})
    assert set(settled) == {"a", "b"}
    assert again[0].predicted == next(speed for speed in again if speed.name == "off").predicted


def test_whole_steps_take_as_much_longer_as_those_that_were_run() -> None:
    table = CostTable((0,), (1, 2, 3, 9), ((1.0, 2.0, 3.0, 4.0),), {})
    steps = [(1, 0, 1.5)] * 5 + [(3, 0, 3.0)] * 4 + [(9, 0, 40.0)] * 3  # of the last there are too few to say
    assert whole_steps(table, steps).seconds == (pytest.approx((1.5, 2.5, 3.0, 4.0)),)
    assert whole_steps(table, []) is table


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_rising_values_rise_and_keep_their_sum(values: list[float]) -> None:
    found = rising(values)
    assert list(found) == sorted(found)
    assert sum(found) == pytest.approx(sum(values))
