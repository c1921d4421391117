"""Merged levels draft in turn, round by round: all have started their programs before the first one reads, and so waits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlsdc.runtime.levels.base import Level, LevelState, Rounds, finished, together
from mlsdc.runtime.levels.compose import MergedLevel
from mlsdc.runtime.tree import Tree


class Nothing(LevelState):
    def observe(self, tokens: Sequence[int]) -> None: ...

    def propose(self, budget: int) -> Tree:
        return Tree((9,), (-1,), (-0.1,), (0,))

    def rollback(self, num_tokens: int) -> None: ...


class InRounds(Level):
    """Says what it does, `rounds` times; its chain has as many tokens."""

    kind = "test"

    def __init__(self, name: str, rounds: int, said: list[str]) -> None:
        self.name, self.rounds, self.said = name, rounds, said

    def start(self) -> LevelState:
        return Nothing()

    def propose_rounds(self, states: Sequence[LevelState], budgets: Sequence[int]) -> Rounds[list[Tree]]:
        for _ in range(self.rounds):
            self.said.append(f"{self.name} starts")
            yield
            self.said.append(f"{self.name} reads")
        token = ord(self.name)
        parents = tuple(range(-1, self.rounds - 1))
        return [Tree((token,) * self.rounds, parents, (-0.5,) * self.rounds, (0,) * self.rounds) for _ in states]


class AtOnce(InRounds):
    """Has no rounds: a level that other levels' work may not come between, or that runs nothing."""

    def propose_all(self, states: Sequence[LevelState], budgets: Sequence[int]) -> list[Tree]:
        self.said.append(f"{self.name} proposes")
        return super().propose_all(states, budgets)

    propose_rounds = Level.propose_rounds


def test_all_start_before_the_first_one_reads() -> None:
    said: list[str] = []
    merged = MergedLevel([InRounds("a", 1, said), InRounds("b", 3, said)], 8)
    (tree,) = merged.propose_all([merged.start()], [8])
    assert said == ["a starts", "b starts", "a reads", "b reads", "b starts", "b reads", "b starts", "b reads"]
    assert sorted(tree.tokens) == [ord("a"), *[ord("b")] * 3]


def test_a_level_without_rounds_proposes_at_once() -> None:
    said: list[str] = []
    merged = MergedLevel([InRounds("a", 2, said), AtOnce("c", 0, said)], 8)
    (tree,) = merged.propose_all([merged.start()], [8])
    assert sorted(tree.tokens) == [9, ord("a"), ord("a")]


def test_a_level_without_rounds_proposes_once_all_others_have_started() -> None:
    said: list[str] = []
    merged = MergedLevel([AtOnce("c", 0, said), InRounds("a", 1, said), InRounds("b", 1, said)], 8)
    merged.propose_all([merged.start()], [8])
    assert said == ["a starts", "b starts", "c proposes", "a reads", "b reads"]


def test_rounds_one_after_the_other_come_to_the_same() -> None:
    levels = [InRounds(name, rounds, []) for name, rounds in (("a", 2), ("b", 0), ("c", 3))]
    states, budgets = [Nothing(), Nothing()], [4, 4]
    alone = [finished(level.propose_rounds(states, budgets)) for level in levels]
    assert together([level.propose_rounds(states, budgets) for level in levels]) == alone


def test_an_error_in_a_round_is_the_callers() -> None:
    def failing() -> Rounds[int]:
        yield
        raise ValueError("in the second round")

    def going() -> Rounds[int]:
        yield
        return 1

    with pytest.raises(ValueError, match="in the second round"):
        together([going(), failing()])
