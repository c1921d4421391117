"""Law L4 where a level works behind the target's step: what that takes is nobody's draft, and still it is paid for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import log

import pytest
from fake_device import VOCAB, FakeMemory, FakeProgram, continuation, make_engine

from mlsdc.runtime.controller import Controller
from mlsdc.runtime.levels.base import LevelState
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from mlsdc.runtime.tree import Tree
from tests.function_level import FunctionLevel

STEP_S, ROW_S, CALL_S = 1e-2, 1e-4, 2e-5  # of a step of the target, of each row more; the clock's own steps
TOKENS = 300


class Gpu:
    """A clock that moves when somebody waits for what was started."""

    now = started = 0.0

    def clock(self) -> float:
        self.now += CALL_S
        return self.now


class Forward(FakeProgram):
    def __init__(self, memory: FakeMemory, gpu: Gpu) -> None:
        super().__init__("forward", memory)
        self.gpu = gpu

    def start(self) -> None:
        self.run()
        self.gpu.started += STEP_S + ROW_S * (self.memory.rows_run[-1] - 1)

    def finish(self) -> None:
        self.gpu.now += self.gpu.started
        self.gpu.started = 0.0


class Behind(FunctionLevel):
    """Two tokens, each right with probability `chance`; making them takes `seconds`, behind the step before, or else when it is asked."""

    looks_ahead = True

    def __init__(self, chance: float, seconds: float, gpu: Gpu) -> None:
        super().__init__(self.proposed)
        self.chance, self.seconds, self.gpu = chance, seconds, gpu
        self.times, self.there = 0, False

    def proposed(self, history: list[int], budget: int) -> Tree:
        rng = random.Random(str(history))
        tokens = [token if rng.random() < self.chance else (token + 1) % VOCAB for token in continuation(history, min(budget, 2))]
        return Tree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), (log(self.chance),) * len(tokens), (0,) * len(tokens))

    def ahead(self, states: Sequence[LevelState | None]) -> None:
        self.gpu.started += self.seconds
        self.times, self.there = self.times + 1, True

    def propose_all(self, states: Sequence[LevelState], budgets: Sequence[int]) -> list[Tree]:
        self.gpu.now += 0.0 if self.there else self.seconds
        self.there = False
        return super().propose_all(states, budgets)


def seconds_a_token(chance: float, seconds: float) -> tuple[float, float, Behind]:
    """Without drafts, with them, and who drafted."""
    gpu = Gpu()
    level = Behind(chance, seconds, gpu)
    engine = make_engine(level, max_model_len=TOKENS + 10, num_pages=400)
    memory = engine._memory
    assert isinstance(memory, FakeMemory)
    engine.drafting.controller, engine.drafting.clock = Controller(), gpu.clock
    engine._forward, engine._follow = Forward(memory, gpu), FakeProgram("follow", memory)
    found = []
    for speculation in (Speculation(enabled=False), None):
        start = gpu.now
        (result,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=TOKENS, speculation=speculation))
        assert result.token_ids == continuation([1, 2, 3], TOKENS)
        found.append((gpu.now - start) / TOKENS)
    return found[0], found[1], level


@pytest.mark.parametrize(("chance", "seconds"), [(0.3, 6e-3), (0.15, 4e-3), (0.5, 9e-3)])
def test_drafts_that_cost_more_behind_a_step_than_they_bring_are_given_up(chance: float, seconds: float) -> None:
    plain, drafted, level = seconds_a_token(chance, seconds)
    assert drafted < 1.05 * plain
    assert level.times < TOKENS // 20


@pytest.mark.parametrize(("chance", "seconds"), [(0.95, 6e-3), (0.6, 3e-3), (0.3, 3e-4)])
def test_drafts_that_pay_go_on_behind_the_steps(chance: float, seconds: float) -> None:
    plain, drafted, level = seconds_a_token(chance, seconds)
    assert drafted < 0.85 * plain
    assert level.times > 100
