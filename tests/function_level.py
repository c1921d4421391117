"""A drafting level that proposes what a function says: what the good, bad and hostile drafts of tests are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlsdc.runtime.controller import Controller, Drafter, Proposal
from mlsdc.runtime.costs import Costs
from mlsdc.runtime.engine import Engine
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


class SendAll(Controller):
    """Every proposed node is verified, whatever it costs: tests of drafts want to see them sent."""

    def choose(self, proposals: Sequence[Proposal], rows: int, sequences: int, context: int, draft_s: float) -> list[Tree]:
        return [proposal.tree for proposal in proposals]

    def welcome(self, drafter: Drafter, sequences: int) -> bool:
        return True

    def room(self, rows: int, sequences: int, context: int) -> int:
        return 64

    def wish(self, drafter: Drafter, budget: int) -> int:
        return budget


def sends_all(engine: Engine) -> Engine:
    """The same engine, with nothing cut from its drafts."""
    engine.drafting.controller = SendAll()
    return engine


class TableCosts(Costs):
    """Steps take what the table says: a machine that is slow or busy decides nothing."""

    def learn(self, rows: int, context: int, seconds: float, *, drafted: bool = False) -> None:
        super().learn(rows, context, self._raw(rows, context), drafted=drafted)


def steady(engine: Engine) -> Engine:
    """The same engine with its own controller, native if the device has one: it decides by tokens and the shipped costs alone."""
    engine.drafting.clock = lambda: 0.0
    engine.drafting.controller = Controller(TableCosts())
    engine.drafting.use(engine.device)
    return engine


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
