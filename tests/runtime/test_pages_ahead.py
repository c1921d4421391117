"""A level that works behind the target's step takes pages while the step runs: pages of sequences may move then, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from fake_device import VOCAB, FakeProgram, continuation
from fake_grouped import GroupedMemory, make_grouped, poison
from proposers import random_trees

from mlsdc.runtime.kv_pool import KvPool, PageTable
from mlsdc.runtime.kv_tail import Tail
from mlsdc.runtime.levels.base import LevelState
from mlsdc.runtime.sampling_params import SamplingParams
from tests.function_level import FunctionLevel, FunctionState, Propose

SLAB = 60  # bytes; a page of the level is a slab
SLABS = 40


class GreedyLevel(FunctionLevel):
    """Behind every step it gives back what it has, takes other slabs, more and more of them, and writes to them."""

    looks_ahead = True
    pool: KvPool
    target: GroupedMemory

    def __init__(self, function: Propose) -> None:
        super().__init__(function)
        self.table, self.steps = PageTable(), 0

    def start(self) -> LevelState:
        return GreedyState(self)

    def ahead(self, states: Sequence[LevelState | None]) -> None:
        self.steps += 1
        self.pool.free(self.table)
        count = next((count for count in range(self.steps % SLABS, 0, -1) if self.pool.can_allocate((), count)), 0)
        if count:
            self.table, _ = self.pool.hold(self.table, count, 0)
        for slab in self.table.pages:
            for page in self.pool.source.pages(slab, self.target.wide_bytes):
                self.target.poison_wide(page)


class GreedyState(FunctionState):
    def __init__(self, level: GreedyLevel) -> None:
        super().__init__(level.function)
        self.level = level

    def release(self) -> bool:
        held = bool(self.level.table.pages)
        self.level.pool.free(self.level.table)
        return held


@pytest.mark.parametrize("seed", range(3))
def test_a_tail_that_moves_while_a_step_runs_is_committed_to_where_it_lies(seed: int) -> None:
    rng = random.Random(seed)
    level = GreedyLevel(random_trees(seed).function)
    engine = make_grouped(level, tail=Tail(4, 4, 2), slabs=SLABS, slab_bytes=SLAB)
    memory, wide = engine._memory, engine.pool.wide
    assert isinstance(memory, GroupedMemory)
    assert wide is not None
    engine._follow = FakeProgram("follow", memory)
    level.target, level.pool = memory, KvPool(engine.pool.source, 1, SLAB, reuse=False)
    moves, renamed = [0], wide._renamed

    def counted(moved: Mapping[int, int]) -> None:
        moves.append(len(moved))
        renamed(moved)

    wide._renamed = counted  # type: ignore[method-assign]
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(14)]
    requests = [engine.submit(prompt, SamplingParams(max_tokens=40)) for prompt in prompts]
    while engine.step():
        engine.check_integrity()
        poison(engine)
    assert [request.output for request in requests] == [continuation(prompt, 40) for prompt in prompts]
    assert sum(moves) > 20
