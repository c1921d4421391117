"""A controller that knows no costs: levels are asked for as much as they may propose, and all of it is sent."""

from __future__ import annotations

from collections.abc import Sequence

from mlsdc.runtime.controller import Controller, Drafter, Proposal
from mlsdc.runtime.tree import MAX_NODES, Tree


class Everything(Controller):
    """Sends what is proposed; what a bench sends instead is a subclass's."""

    def room(self, rows: int, sequences: int, context: int) -> int:
        return MAX_NODES

    def choose(self, proposals: Sequence[Proposal], rows: int, sequences: int, context: int, draft_s: float) -> list[Tree]:
        return [proposal.tree for proposal in proposals]

    def wish(self, drafter: Drafter, budget: int) -> int:
        return budget
