"""The planner's equations against simulation and exhaustive search, and what it says of levels that do not pay."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsdc.compiler.planner import (
    Candidate,
    Outcome,
    Stage,
    Survival,
    best_tree,
    choose,
    evaluate,
    tree_tokens,
)


def knee(base: float, row: float, free: int, rows: int) -> float:
    """Flat up to `free` rows, then `row` seconds more a row."""
    return base + row * max(0, rows - free)


def simulate(chain: int, draft_s: float, stages: list[Stage], rounds: int, seed: int) -> Outcome:
    """The same cascade played out, round by round, all of them at once."""
    rng = np.random.default_rng(seed)

    def level(i: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        if i < 0:
            return np.full(count, chain), np.full(count, chain * draft_s)
        stage = stages[i]
        given, seconds = level(i - 1, count * stage.rounds)
        given, seconds = given.reshape(count, -1).sum(1), seconds.reshape(count, -1).sum(1)
        curve = stage.survival.curve(int(given.max()))
        reached = (rng.random(count)[:, None] < curve[None, 1:]).sum(1)
        return np.minimum(given, reached) + 1, seconds + np.array([stage.step_s(int(n) + 1) for n in given])

    tokens, seconds = level(len(stages) - 1, rounds)
    return Outcome(float(tokens.mean()), float(seconds.mean()))


CASCADES = [
    (4, 0.02, [Stage("target", Survival(0.7), partial(knee, 1.0, 0.1, 4))]),
    (3, 0.01, [Stage("middle", Survival(0.6), partial(knee, 0.2, 0.05, 2)),
               Stage("target", Survival(0.85), partial(knee, 1.0, 0.1, 6), 2)]),
    (2, 0.01, [Stage("a", Survival(0.5), partial(knee, 0.1, 0.02, 2)), Stage("b", Survival(0.7), partial(knee, 0.3, 0.05, 4), 2),
               Stage("target", Survival(0.9), partial(knee, 1.0, 0.1, 8), 2)]),
    (5, 0.03, [Stage("target", Survival(0.3, (0.8, 0.7, 0.68)), partial(knee, 1.0, 0.2, 2))]),
]


@pytest.mark.parametrize(("chain", "draft_s", "stages"), CASCADES)
def test_equations_are_what_simulation_says_within_one_percent(chain: int, draft_s: float, stages: list[Stage]) -> None:
    found, played = evaluate(chain, draft_s, stages), simulate(chain, draft_s, stages, 200_000, 1)
    assert found.tokens == pytest.approx(played.tokens, rel=0.01)
    assert found.seconds == pytest.approx(played.seconds, rel=0.01)


@given(st.floats(0, 0.99), st.integers(1, 12))
def test_one_level_is_the_geometric_sum(alpha: float, chain: int) -> None:
    outcome = evaluate(chain, 0.0, [Stage("target", Survival(alpha), lambda rows: 1.0)])
    assert outcome.tokens == pytest.approx(sum(alpha**j for j in range(chain + 1)))


@given(st.floats(0.01, 0.95), st.floats(0.01, 0.95), st.integers(1, 4), st.integers(1, 3))
def test_two_levels_are_the_closed_form(low: float, high: float, chain: int, rounds: int) -> None:
    """E[N_2] = (1 - a G(a)) / (1 - a), G = phi_1^n (DESIGN 6)."""
    x = high
    phi = x * ((1 - low) + low * (1 - x) * (low * x) ** chain / 1.0) / (1 - low * x)
    expected = (1 - high * phi**rounds) / (1 - high)
    stages = [Stage("middle", Survival(low), lambda rows: 0.1), Stage("target", Survival(high), lambda rows: 1.0, rounds)]
    assert evaluate(chain, 0.0, stages).tokens == pytest.approx(expected, rel=1e-9)


def test_a_step_is_priced_by_its_distribution_of_rows_not_by_their_mean() -> None:
    step = partial(knee, 1.0, 1.0, 6)
    stages = [Stage("middle", Survival(0.5), lambda rows: 0.0), Stage("target", Survival(0.5), step, 3)]
    mean_rows = 3 * evaluate(3, 0.0, stages[:1]).tokens + 1
    assert 6 < mean_rows < 7
    assert evaluate(3, 0.0, stages).seconds > (1.0 + (mean_rows - 6)) * 1.03


RANKS = st.lists(st.floats(0.01, 0.6), min_size=1, max_size=4).map(lambda p: sorted((x / max(1.0, sum(p)) for x in p), reverse=True))


@settings(max_examples=60, deadline=None)
@given(RANKS, st.integers(1, 9))
def test_best_first_accepts_as_much_as_dynamic_programming(ranks: list[float], nodes: int) -> None:
    tree = best_tree(ranks, nodes)
    assert len(tree.parents) == nodes
    assert tree.tokens == pytest.approx(tree_tokens(ranks, nodes))


@settings(max_examples=30, deadline=None)
@given(RANKS, st.integers(1, 4))
def test_best_first_is_the_best_of_all_trees(ranks: list[float], nodes: int) -> None:
    best = 0.0
    for parents in itertools.product(*(range(-1, i) for i in range(nodes))):
        chances, children = list[float](), dict[int, int]()
        for parent in parents:
            rank = children.get(parent, 0)
            children[parent] = rank + 1
            chances.append((chances[parent] if parent >= 0 else 1.0) * (ranks[rank] if rank < len(ranks) else 0.0))
        best = max(best, 1 + sum(chances))
    assert best_tree(ranks, nodes).tokens == pytest.approx(best)


def test_a_tree_is_no_deeper_than_it_may_be() -> None:
    tree = best_tree([0.9, 0.05], 6, depth=2)
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    assert max(depths) == 2


def target(rows: int) -> float:
    return knee(1.0, 0.1, 8, rows)


def test_the_choice_is_the_best_of_an_exhaustive_search() -> None:
    candidates = [
        Candidate("draft", {"middle": Survival(0.7), "target": Survival(0.6)}, 0.05, None, {"target": (0.6, 0.15)}),
        Candidate("middle", {"target": Survival(0.85)}, 0.2, partial(knee, 0.2, 0.01, 4)),
    ]
    decision = choose(candidates, "target", target, max_nodes=8)
    speeds = [1.0]
    for chain in range(1, 9):
        speeds.append(evaluate(chain, 0.05, [Stage("target", Survival(0.6), target)]).speed)
        speeds.append(evaluate(chain, 0.2, [Stage("target", Survival(0.85), target)]).speed)
        tree = best_tree((0.6, 0.15), chain)
        speeds.append(tree.tokens / (target(1 + chain) + chain * 0.05))
        for rounds in range(1, 5):
            if chain * rounds <= 8 or rounds == 1:
                stages = [Stage("middle", Survival(0.7), partial(knee, 0.2, 0.01, 4)), Stage("target", Survival(0.85), target, rounds)]
                speeds.append(evaluate(chain, 0.05, stages).speed)
    assert decision.plans[0].outcome.speed == pytest.approx(max(speeds))


def test_a_level_that_does_not_pay_is_dropped_with_the_reason() -> None:
    good = Candidate("good", {"target": Survival(0.8)}, 0.02)
    poor = Candidate("poor", {"target": Survival(0.05)}, 0.2)
    decision = choose([poor, good], "target", target, max_nodes=8)
    assert decision.best.levels == ("good",)
    assert set(decision.dropped) == {"poor"}
    assert "5 % is the least that pays" in decision.dropped["poor"]
    assert "good: chain of" in decision.dropped["poor"]


def test_off_is_chosen_where_nothing_pays() -> None:
    decision = choose([Candidate("poor", {"target": Survival(0.1)}, 0.5)], "target", lambda rows: float(rows), max_nodes=8)
    assert (str(decision.best), decision.best.outcome.speed) == ("off", 1.0)
    assert set(decision.dropped) == {"poor"}


def test_a_large_batch_turns_off_what_pays_alone() -> None:
    draft = Candidate("draft", {"target": Survival(0.6)}, 0.01)
    assert choose([draft], "target", target, max_nodes=8).best.levels == ("draft",)
    assert choose([draft], "target", target, max_nodes=8, batch=16).best.levels == ()


@pytest.mark.parametrize(("alpha", "measured"), [(1.5, ()), (-0.1, ()), (0.5, (0.4, 0.6)), (0.5, (1.2,))])
def test_chances_that_are_none_are_refused(alpha: float, measured: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected falling chances"):
        Survival(alpha, measured)
