"""An eagle head: one decoder layer that guesses the target's next hidden state, again and again, with keys and values of its own.

A draft is: (1) the rows of tokens committed since the last draft, made of the target's own hidden states; their keys go to pages; the last
one guesses the tree's first depth. (2) Depth by depth, rows of the likeliest nodes, whose hidden states are the head's own outputs; their
keys go to scratch slots and are forgotten. The tree is the likeliest `budget` nodes of all that were guessed.

Positions count from the first hidden state that a request's context began with: RoPE only sees differences.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlsdc.runtime.device.base import BoundProgram, LevelMemory
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.kv_pool import KvPool, PageTable
from mlsdc.runtime.levels.ahead import Ahead, likeliest
from mlsdc.runtime.levels.base import LevelState, Rounds
from mlsdc.runtime.levels.coupling import coupled
from mlsdc.runtime.levels.growing import GrowingLevel, Growth, log_guesses
from mlsdc.runtime.levels.heads import HeadLevel, HeadState
from mlsdc.runtime.step import Array, Header
from mlsdc.runtime.tree import EMPTY, Tree


class EagleState(HeadState):
    """`fed`: positions base .. fed - 1 have their keys in `table`'s pages."""

    def __init__(self, level: EagleLevel) -> None:
        super().__init__(level)
        self.table = PageTable()
        self.base = self.fed = 0
        self.eagle = level

    def restart(self) -> None:
        if self.fed > self.base:
            self.level.counters["restarts"] += 1
        super().restart()
        self.base = self.fed = self.kept_from

    def rollback(self, num_tokens: int) -> None:
        super().rollback(num_tokens)
        self.fed = min(self.fed, max(self.base, self.kept_to))

    def release(self) -> bool:
        held = bool(self.table.pages)
        self.eagle.pool.free(self.table)
        self.fed = self.base
        self.forget()
        return held


class EagleLevel(HeadLevel, GrowingLevel):
    pool: KvPool
    has_features = True

    def bind(self, memory: LevelMemory, target: LevelMemory, pool: KvPool | None) -> None:
        self.ids = self.d2t
        HeadLevel.bind(self, memory, target, pool)
        GrowingLevel.bind(self, memory, target, pool)
        if pool is None:
            raise ArtifactError(f"level '{self.name}': has no pages for its keys and values; compile again")
        self.fuse = memory.programs.get("fuse")
        self.context = memory.buffers.limits.max_model_len

    def start(self) -> LevelState:
        return EagleState(self)

    def draft(self, states: Sequence[HeadState], budgets: Sequence[int]) -> Rounds[list[Tree]]:
        self.collect()
        trees: dict[int, Tree] = {}
        able: list[tuple[EagleState, int]] = []
        for state, budget in zip(states, budgets, strict=True):
            assert isinstance(state, EagleState)
            made = state.take(state.kept_to - state.base)
            if made is not None:
                state.fed = state.kept_to
                trees[id(state)] = likeliest(made, budget)
            elif self._room(state):
                able.append((state, budget))
        most = self.buffers.limits.max_num_seqs
        for start in range(0, len(able), most):
            part = able[start : start + most]
            for state, _ in part:  # once drafted, a last row is made again where nothing is new: its keys are the same bytes
                state.fed = min(state.fed, state.kept_to - 1)
            if self.grows_there(len(part), sum(state.kept_to - state.fed for state, _ in part)):
                trees |= yield from self._grown_there(part)
                continue
            lasts = yield from self._catch_up([state for state, _ in part])
            grown = [Growth(state.table, state.fed - state.base, budget, draw=state.drawn, shift=state.base + 2) for state, budget in part]
            for growth, (logp, tokens, feature) in zip(grown, lasts, strict=True):
                growth.add(-1, logp, tokens, feature, 0, self.log_floor)
            yield from self.grow(grown, self.depth - 1)
            trees |= {id(state): growth.tree(self.index) for (state, _), growth in zip(part, grown, strict=True)}
        return [trees.get(id(state), EMPTY) for state in states]

    def _grown_there(self, part: Sequence[tuple[EagleState, int]]) -> Rounds[dict[int, Tree]]:
        """The device's trees, by id of the state."""
        assert self.trees is not None
        work, rows = self._write_committed([state for state, _ in part], self.trees)
        growths = []
        for (state, _, count), (_, budget) in zip(work, part, strict=True):
            state.fed += count
            growths.append(Growth(state.table, state.fed - state.base, budget, draw=state.drawn, shift=state.base + 2))
        lasts = [state.tokens[state.fed] for state, _ in part]
        trees = yield from self.grown(growths, [state.fed + 1 for state, _ in part], lasts, rows)
        return {id(state): tree for (state, _), tree in zip(part, trees, strict=True)}

    def follow(self, behind: Ahead[EagleState], states: Sequence[LevelState | None]) -> None:
        def fits(state: EagleState, room: int) -> bool:
            if state.made_for(state.kept_to - state.base) is not None:
                state.fed = state.kept_to  # nobody asked for it, and its rows are there
            return state.ready() and state.fed == state.kept_to and self._room(state, room)

        self.grow_behind(behind, behind.chosen(states, EagleState, fits),
                         lambda state: (state.table, state.fed - state.base, state.base + 2))

    def _room(self, state: EagleState, more: int = 0) -> bool:
        """Pages for the request's rows, and for `more` of the step that runs; a context that has become too long, or whose next hidden
        state is gone, begins anew."""
        if state.fed < state.kept_from or state.kept_to + more - state.base > self.context:
            if more:
                return False
            state.restart()
        scratch = self.buffers.limits.scratch_pages(self.pool.page_size)
        state.table, held = self.pool.hold(state.table, state.kept_to + more - state.base, scratch)
        return held

    def _write_committed(self, states: Sequence[EagleState], program: BoundProgram) -> tuple[list[tuple[EagleState, int, int]], int]:
        """Rows of what was committed since, for `program`, as many as there is room for: (state, its first row, rows), and all rows."""
        row = 0
        part: list[tuple[EagleState, int, int]] = []
        for state in states:
            count = min(state.kept_to - state.fed, self.most_rows - row)
            if count > 0:
                part.append((state, row, count))
                row += count
        if self.fuse is not None:
            for state, first, count in part:
                self.buffers.taps[first : first + count] = state.hidden(state.fed, state.fed + count)
            self.buffers.header[Header.ROWS] = row
            if not self.fuse.feed(program, "features"):
                self.buffers.features[:row] = self.fuse.tap("features")[:row]
        for seq, (state, first, count) in enumerate(part):
            if self.fuse is None:
                self.buffers.features[first : first + count] = state.hidden(state.fed, state.fed + count)
            end = first + count
            self.buffers.tokens[first:end] = state.tokens[state.fed + 1 : state.fed + count + 1]
            self.buffers.positions[first:end] = range(state.fed - state.base, state.fed - state.base + count)
            self.buffers.row_slot[first:end] = -1
            self.buffers.ancestors[first:end] = 0
            self.sequence(seq, state.table, first, count, state.fed - state.base)
            self.buffers.out_rows[seq] = end - 1
        return part, row

    def _catch_up(self, states: Sequence[EagleState]) -> Rounds[list[tuple[Array, Array, Array]]]:
        """Rows of what was committed since; of each request's last row: log probabilities, tokens, hidden state."""
        lasts: dict[int, tuple[Array, Array, Array]] = {}
        while len(lasts) < len(states):
            part, row = self._write_committed([state for state in states if id(state) not in lasts], self.program)
            self.begin_run(row, len(part), len(part))
            yield
            self.program.finish()
            top, hidden = self.program.tap("top"), self.program.tap("hidden")
            ends = [state.fed + count for state, _, count in part]
            owners = [state.drawn if end == state.kept_to else None for (state, _, _), end in zip(part, ends, strict=True)]
            logp, tokens = coupled(*log_guesses(top[: len(part)], self.ids), owners, [end + 1 for end in ends], self.draws)
            for seq, (state, first, count) in enumerate(part):
                state.fed += count
                if state.fed == state.kept_to:
                    lasts[id(state)] = logp[seq], tokens[seq], hidden[first + count - 1].copy()
        return [lasts[id(state)] for state in states]
