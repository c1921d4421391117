"""What the engine tells its controller that drafts cost: all that they add to a step. Clocks move in choosing and learning alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fake_device import make_engine
from proposers import random_trees

from mlsdc.runtime.controller import Proposal
from mlsdc.runtime.drafting import QUIET_LEARNED, UNTIMED
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.tree import Tree
from tests.function_level import SendAll


class Timed(SendAll):
    """Learning takes a millisecond a proposal, choosing 2, and nothing else takes any."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.told: list[float] = []  # what a proposal was said to cost, of each choice
        self.learned_steps = 0

    def choose(self, proposals: Sequence[Proposal], rows: int, sequences: int, context: int, draft_s: float) -> list[Tree]:
        self.told.append(draft_s / len(proposals))
        self.now += 2e-3 * len(proposals)
        return super().choose(proposals, rows, sequences, context, draft_s)

    def learn(self, proposal: Proposal, committed: Sequence[int]) -> None:
        self.now += 1e-3

    def step(self, rows: int, context: int, seconds: float, nodes: int = 0) -> None:
        self.learned_steps += 1


@pytest.mark.parametrize("requests", [1, 3])
def test_learning_is_a_part_of_what_a_draft_costs(requests: int) -> None:
    engine = make_engine(random_trees(1))
    engine.drafting.controller = controller = Timed()
    engine.drafting.clock = lambda: controller.now
    engine.generate([[1, 2, 3]] * requests, SamplingParams(max_tokens=90))
    assert controller.told[0] < 1e-3
    assert controller.told[-1] == pytest.approx(UNTIMED * 3e-3, rel=0.2)


def test_of_steps_in_which_nobody_is_asked_every_fourth_is_timed() -> None:
    class NoRoom(Timed):
        def room(self, rows: int, sequences: int, context: int) -> int:
            return 0

    engine = make_engine(random_trees(1))
    engine.drafting.controller = controller = NoRoom()
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=41))
    assert not controller.told
    assert controller.learned_steps == 40 // QUIET_LEARNED
