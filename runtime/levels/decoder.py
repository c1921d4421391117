"""Levels that are decoders themselves: `model`, with weights and pages of its own, and `self`, the target's first layers over its pages.

Both grow trees (growing.py), and both can stand above another level: they judge its tree by their own probabilities, in one run, and extend
what is left of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.base import LevelMemory, NativeFunction
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.kv_pool import KvPool, PageTable
from mlsdc.runtime.levels.ahead import Ahead, Follower, likeliest
from mlsdc.runtime.levels.base import LevelState, Rounds, Verifier, finished
from mlsdc.runtime.levels.coupling import Draws, coupled
from mlsdc.runtime.levels.growing import GrowingLevel, Growth, Row, draft_ids, log_guesses
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.step import Array
from mlsdc.runtime.tree import EMPTY, Tree


class DecoderLevel(GrowingLevel, Verifier):
    """What the two share: params, and the way from states to trees."""

    def __init__(self, info: LevelInfo, index: int, ids: Array | None, vocab_size: int, draws: Draws) -> None:
        """Raises ArtifactError for params that no compile writes."""
        self.name, self.kind, self.index, self.ids, self.vocab_size = info.name, info.kind, index, ids, vocab_size
        try:
            self.max_nodes, self.depth = int(info.params["max_nodes"]), int(info.params["depth"])
            self.floor = float(info.params["min_probability"])
            self.context = int(info.params.get("context", 0))
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"level '{info.name}': its params are not a decoder's ({error}); compile again") from None
        self.draws = draws
        self.counters = {"restarts": 0}  # how often a context grew too long and began anew with its last tokens

    @classmethod
    def load(cls, info: LevelInfo, index: int, functions: Callable[[str], NativeFunction | None], artifact: Artifact) -> DecoderLevel:
        """Raises ArtifactError."""
        return cls(info, index, draft_ids(info, artifact), artifact.manifest.model.vocab_size, Draws(functions))

    def propose_all(self, states: Sequence[LevelState], budgets: Sequence[int]) -> list[Tree]:
        return self.propose_above(states, budgets, [EMPTY] * len(states))

    def propose_above(self, states: Sequence[LevelState], budgets: Sequence[int], below: Sequence[Tree]) -> list[Tree]:
        return finished(self.rounds_above(states, budgets, below))

    def rounds_above(self, states: Sequence[LevelState], budgets: Sequence[int], below: Sequence[Tree]) -> Rounds[list[Tree]]:
        found: list[Tree] = [EMPTY] * len(states)
        able = [i for i, state in enumerate(states) if budgets[i] > 0 and self.ready(state)]
        most = self.buffers.limits.max_num_seqs
        for start in range(0, len(able), most):
            part = able[start : start + most]
            wanted = [min(budgets[i], self.max_nodes) for i in part]
            trees = None
            if not any(below[i] for i in part):
                trees = yield from self.grown_there([states[i] for i in part], wanted)
            if trees is None:
                growths = yield from self.begin([states[i] for i in part], wanted, [below[i] for i in part])
                yield from self.grow(growths, self.depth - 1)
                trees = [growth.tree(self.index) for growth in growths]
            for i, tree in zip(part, trees, strict=True):
                found[i] = tree
        return found

    @abstractmethod
    def ready(self, state: LevelState) -> bool:
        """Whether the request can draft now; its pages are there then."""

    @abstractmethod
    def grown_there(self, states: Sequence[LevelState], budgets: Sequence[int]) -> Rounds[list[Tree] | None]:
        """Trees that the device grew; None: it does not grow these."""

    @abstractmethod
    def begin(self, states: Sequence[LevelState], budgets: Sequence[int], below: Sequence[Tree]) -> Rounds[list[Growth]]:
        """Each request's tree with its first guesses, and with what is kept of the tree below."""


class SelfState(LevelState):
    """The request's last token, and where the target keeps its keys and values."""

    def __init__(self) -> None:
        self.last = -1
        self.table = PageTable()
        self.computed = 0

    def observe(self, tokens: Sequence[int]) -> None:
        if tokens:
            self.last = tokens[-1]

    def place(self, table: PageTable, computed: int) -> None:
        self.table, self.computed = table, computed

    def propose(self, budget: int) -> Tree:
        return EMPTY  # alone it knows no device; `SelfLevel.propose_all` does

    def rollback(self, num_tokens: int) -> None:
        self.last = -1


class SelfLevel(DecoderLevel):
    """The target's first layers and an exit. What they would write of committed tokens the target has written: nothing is computed twice.
    Its own rows go to the sequence's scratch slots, which the target's verify overwrites."""

    def start(self) -> LevelState:
        return SelfState()

    def ready(self, state: LevelState) -> bool:
        return isinstance(state, SelfState) and state.last >= 0 and bool(state.table.scratch) and bool(state.table.pages)

    def begin(self, states: Sequence[LevelState], budgets: Sequence[int], below: Sequence[Tree]) -> Rounds[list[Growth]]:
        growths, lasts = self._growths(states, budgets)
        yield from self.judge(growths, below, lasts)
        return growths

    def grown_there(self, states: Sequence[LevelState], budgets: Sequence[int]) -> Rounds[list[Tree] | None]:
        if not self.grows_there(len(states), len(states)):
            return None
        growths, lasts = self._growths(states, budgets)
        _, turns = self.write([(growth, [Row(last, 0, None)]) for growth, last in zip(growths, lasts, strict=True)])
        trees = yield from self.grown(growths, turns, lasts, len(growths))
        return trees

    def _growths(self, states: Sequence[LevelState], budgets: Sequence[int]) -> tuple[list[Growth], list[int]]:
        """Trees with nothing in them, and the last tokens, which become the first rows in scratch."""
        growths, lasts = [], []
        for state, budget in zip(states, budgets, strict=True):
            assert isinstance(state, SelfState)
            growths.append(Growth(state.table, state.computed, budget, root=1, draw=state.drawn, shift=1))
            lasts.append(state.last)
        return growths, lasts


class ModelState(Follower[Tree]):
    """One request: its tokens; positions base .. fed - 1 have their keys in `table`'s pages."""

    def __init__(self, level: ModelLevel) -> None:
        self.level = level
        self.tokens: list[int] = []
        self.table = PageTable()
        self.base = self.fed = 0

    def observe(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def propose(self, budget: int) -> Tree:
        return self.level.propose_all([self], [budget])[0]

    def rollback(self, num_tokens: int) -> None:
        self.forget()
        del self.tokens[max(0, len(self.tokens) - num_tokens) :]
        self.base = min(self.base, len(self.tokens))
        self.fed = max(self.base, min(self.fed, len(self.tokens)))
        pool = self.level.pool
        if self.table.pages and (pool.wide is not None or not pool.reaches(self.table, self.next_row)):
            self.release()  # what it would read has left the window, or the ring of 16-bit tokens: it begins anew

    @property
    def next_row(self) -> int:
        """Position of the first row that the next draft computes."""
        return max(0, min(self.fed, len(self.tokens) - 1) - self.base)

    def release(self) -> bool:
        held = bool(self.table.pages)
        self.forget()
        self.level.pool.free(self.table)
        self.fed = self.base
        return held


class ModelLevel(DecoderLevel):
    """A smaller model. A context longer than `context` begins anew with the last half of it: positions count from there. With a window
    (kv_window.py) a request holds the pages of its sinks and of its last positions, however long it is."""

    pool: KvPool

    def bind(self, memory: LevelMemory, target: LevelMemory, pool: KvPool | None) -> None:
        super().bind(memory, target, pool)
        if pool is None:
            raise ArtifactError(f"level '{self.name}': has no pages for its keys and values; compile again")
        self.pool = pool
        self.behind = Ahead.of(memory, target)
        if self.ids is not None:  # the way back: what the model calls each of the target's tokens
            self.own_ids = np.zeros(max(int(self.ids.max()) + 1, self.vocab_size), np.int32)
            self.own_ids[self.ids] = np.arange(len(self.ids), dtype=np.int32)
        self.context = min(self.context or memory.buffers.limits.max_model_len, memory.buffers.limits.max_model_len)

    def start(self) -> LevelState:
        return ModelState(self)

    def propose_rounds(self, states: Sequence[LevelState], budgets: Sequence[int]) -> Rounds[list[Tree]]:
        return self.rounds_above(states, budgets, [EMPTY] * len(states))  # a `self` level has none: its rows lie in the target's slots

    def ready(self, state: LevelState) -> bool:
        if not isinstance(state, ModelState) or not state.tokens:
            return False
        if len(state.tokens) - state.base > self.context - self.depth:
            if state.fed > state.base:
                self.counters["restarts"] += 1
            state.base = state.fed = max(0, len(state.tokens) - max(1, self.context // 2))
            state.forget()
            if self.pool.window is not None:
                self.pool.free(state.table)
        scratch = self.buffers.limits.scratch_pages(self.pool.scratch_page_size)
        state.table, held = self.pool.hold(state.table, len(state.tokens) - state.base, scratch, state.next_row)
        return held

    def begin(self, states: Sequence[LevelState], budgets: Sequence[int], below: Sequence[Tree]) -> Rounds[list[Growth]]:
        owners = [state for state in states if isinstance(state, ModelState)]
        lasts = yield from self._catch_up(owners)
        growths = self._growths(owners, budgets)
        for growth, (logp, tokens) in zip(growths, lasts, strict=True):
            growth.add(-1, logp, tokens, None, 0, self.log_floor)
        yield from self.judge(growths, below)
        return growths

    def _growths(self, states: Sequence[ModelState], budgets: Sequence[int]) -> list[Growth]:
        return [Growth(state.table, len(state.tokens) - state.base, budget, draw=state.drawn, shift=state.base + 1)
                for state, budget in zip(states, budgets, strict=True)]

    def grown_there(self, states: Sequence[LevelState], budgets: Sequence[int]) -> Rounds[list[Tree] | None]:
        self.collect()
        owners = [state for state in states if isinstance(state, ModelState)]
        trees: dict[int, Tree] = {}
        left: list[tuple[ModelState, int]] = []
        for state, budget in zip(owners, budgets, strict=True):
            made = state.take(len(state.tokens) - state.base)
            if made is not None:
                state.fed = len(state.tokens)
                self.pool.trim(state.table, state.fed - state.base)
                trees[id(state)] = likeliest(made, budget)
            else:
                state.fed = min(state.fed, len(state.tokens) - 1)
                left.append((state, budget))
        if left:
            if not self.grows_there(len(left), sum(len(state.tokens) - state.fed for state, _ in left)):
                return None
            part, rows = self._write_committed([state for state, _ in left])
            lasts = [int(self.spoken(state.tokens[-1:])[0]) for state, _ in left]
            growths = self._growths([state for state, _ in left], [budget for _, budget in left])
            grown = yield from self.grown(growths, [len(state.tokens) for state, _ in left], lasts, rows)
            for (state, count), tree in zip(part, grown, strict=True):
                state.fed += count
                self.pool.trim(state.table, state.fed - state.base)
                trees[id(state)] = tree
        return [trees[id(state)] for state in owners]

    def follow(self, behind: Ahead[ModelState], states: Sequence[LevelState | None]) -> None:
        scratch = self.buffers.limits.scratch_pages(self.pool.scratch_page_size)

        def fits(state: ModelState, room: int) -> bool:
            committed = len(state.tokens) - state.base
            if state.made_for(committed) is not None:
                state.fed = len(state.tokens)  # nobody asked for it, and its rows are there
            if state.fed != len(state.tokens) or committed + room > self.context - self.depth:
                return False
            state.table, held = self.pool.hold(state.table, committed + room, scratch)
            return held

        self.grow_behind(behind, behind.chosen(states, ModelState, fits),
                         lambda state: (state.table, len(state.tokens) - state.base, state.base + 1))

    def _write_committed(self, states: Sequence[ModelState]) -> tuple[list[tuple[ModelState, int]], int]:
        """Rows of tokens without keys, as many as there is room for: of which requests how many, and all of them together."""
        at = 0
        part: list[tuple[ModelState, int]] = []
        for state in states:
            count = min(len(state.tokens) - state.fed, self.most_rows - at)
            if count <= 0:
                continue
            end, first = at + count, state.fed - state.base
            self.pool.slide(state.table, first, first + count)
            self.buffers.tokens[at:end] = self.spoken(state.tokens[state.fed : state.fed + count])
            self.buffers.positions[at:end] = range(first, first + count)
            self.buffers.row_slot[at:end] = -1
            self.buffers.ancestors[at:end] = 0
            self.sequence(len(part), state.table, at, count, first)
            self.buffers.out_rows[len(part)] = end - 1
            part.append((state, count))
            at = end
        return part, at

    def _catch_up(self, states: Sequence[ModelState]) -> Rounds[list[tuple[Array, Array]]]:
        """Rows of all tokens without keys, the last token's at least; each request's guesses after its last token."""
        lasts: dict[int, tuple[Array, Array]] = {}
        for state in states:
            state.fed = min(state.fed, len(state.tokens) - 1)
        while len(lasts) < len(states):
            part, at = self._write_committed([state for state in states if id(state) not in lasts])
            self.begin_run(at, len(part), len(part))
            yield
            self.program.finish()
            ends = [state.fed + count for state, count in part]
            owners = [state.drawn if end == len(state.tokens) else None for (state, _), end in zip(part, ends, strict=True)]
            guesses = log_guesses(self.program.tap("top")[: len(part)], self.ids, self.vocab_size)
            logp, tokens = coupled(*guesses, owners, ends, self.draws)
            for seq, (state, count) in enumerate(part):
                state.fed += count
                if state.fed == len(state.tokens):
                    self.pool.trim(state.table, state.fed - state.base)
                    lasts[id(state)] = logp[seq], tokens[seq]
        return [lasts[id(state)] for state in states]
