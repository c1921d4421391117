"""A drafting level that proposes what a function says: what the good, bad and hostile drafts of tests are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlsdc.runtime.levels.base import Level, LevelState
from mlsdc.runtime.tree import Tree

Propose = Callable[[list[int], int], Tree]


class FunctionLevel(Level):
    """Proposes whatever `function(history, budget)` says."""

    kind = "test"

    def __init__(self, function: Propose, name: str = "draft") -> None:
        self.name = name
        self.function = function

    def start(self) -> LevelState:
        return FunctionState(self.function)


class FunctionState(LevelState):
    def __init__(self, function: Propose) -> None:
        self.function = function
        self.history: list[int] = []

    def observe(self, tokens: Sequence[int]) -> None:
        self.history += tokens

    def propose(self, budget: int) -> Tree:
        return self.function(self.history, budget)

    def rollback(self, num_tokens: int) -> None:
        del self.history[len(self.history) - num_tokens :]
