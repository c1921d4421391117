"""An eagle head: one decoder layer that guesses the target's next hidden state, again and again, with keys and values of its own.

A draft is: (1) the rows of tokens committed since the last draft, made of the target's own hidden states; their keys go to pages; the last
one guesses the tree's first depth. (2) Depth by depth, rows of the likeliest nodes, whose hidden states are the head's own outputs; their
keys go to scratch slots and are forgotten. The tree is the likeliest `budget` nodes of all that were guessed.

Positions count from the first hidden state that a request's context began with: RoPE only sees differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mlsdc.runtime.device.base import LevelMemory
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.kv_pool import KvPool, PageTable
from mlsdc.runtime.levels.base import LevelState
from mlsdc.runtime.levels.heads import HeadLevel, HeadState
from mlsdc.runtime.step import Array, Header
from mlsdc.runtime.tree import EMPTY, Tree

SPREAD = 8  # rows of a request at one depth: a tile


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
        self.base = self.fed = self.kept_from

    def rollback(self, num_tokens: int) -> None:
        super().rollback(num_tokens)
        self.fed = min(self.fed, max(self.base, self.kept_to))

    def close(self) -> None:
        if self.eagle.pool is not None:
            self.eagle.pool.free(self.table)


@dataclass
class Growth:
    """A request's tree while it grows. Nodes are in order of guessing; `slot` is the scratch slot of a node that became a row."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    logq: list[float] = field(default_factory=list)
    paths: list[float] = field(default_factory=list)
    words: list[int] = field(default_factory=list)  # ancestor slots of a node's row, without its own
    features: dict[int, Array] = field(default_factory=dict)  # node -> the hidden state its row starts from
    slots: int = 0

    def add(self, parent: int, logp: Array, tokens: Array, feature: Array, word: int, floor: float) -> None:
        above = self.paths[parent] if parent >= 0 else 0.0
        for value, token in zip(logp.tolist(), tokens.tolist(), strict=True):
            if not above + value >= floor:
                break
            self.features[len(self.tokens)] = feature
            self.tokens.append(token)
            self.parents.append(parent)
            self.logq.append(value)
            self.paths.append(above + value)
            self.words.append(word)

    def best(self, count: int) -> list[int]:
        """The likeliest `count` nodes, in order of guessing: parents come first, for no child is likelier than its parent."""
        order = sorted(range(len(self.tokens)), key=lambda i: (-self.paths[i], i))[:count]
        return sorted(order)


class EagleLevel(HeadLevel):
    pool: KvPool

    def bind(self, memory: LevelMemory, target: LevelMemory, pool: KvPool | None) -> None:
        super().bind(memory, target, pool)
        if pool is None:
            raise ArtifactError(f"level '{self.name}': has no pages for its keys and values; compile again")
        self.program = memory.programs["draft"]
        self.fuse = memory.programs.get("fuse")
        limits = memory.buffers.limits
        self.most_rows = min(limits.max_num_batched_tokens, limits.max_logit_rows)
        self.most_slots = min(64, limits.scratch_pages(pool.page_size) * pool.page_size)
        self.context = limits.max_model_len

    def start(self) -> LevelState:
        return EagleState(self)

    def draft(self, states: Sequence[HeadState], budgets: Sequence[int]) -> list[Tree]:
        floor = float(np.log(self.floor)) if self.floor > 0 else -1e30
        able = [state for state in states if isinstance(state, EagleState) and self._room(state)]
        grown: dict[int, Growth] = {}
        for start in range(0, len(able), self.buffers.limits.max_num_seqs):
            part = able[start : start + self.buffers.limits.max_num_seqs]
            lasts = self._catch_up(part)
            growths = [Growth() for _ in part]
            for growth, (logp, tokens, feature) in zip(growths, lasts, strict=True):
                growth.add(-1, logp, tokens, feature, 0, floor)
            wanted = [budgets[i] for state in part for i, other in enumerate(states) if other is state]
            fresh = [0] * len(part)
            for _ in range(self.depth - 1):
                fresh = self._deepen(part, growths, wanted, fresh, floor)
                if not fresh:
                    break
            grown |= {id(state): growth for state, growth in zip(part, growths, strict=True)}
        return [self._tree(grown[id(s)], n) if id(s) in grown else EMPTY for s, n in zip(states, budgets, strict=True)]

    def _room(self, state: EagleState) -> bool:
        """Pages for the request's rows; a context that has become too long, or whose next hidden state is gone, begins anew."""
        if state.fed < state.kept_from or state.kept_to - state.base > self.context:
            state.restart()
        scratch = self.buffers.limits.scratch_pages(self.pool.page_size)
        count = state.kept_to - state.base
        if not state.table.pages:
            if not self.pool.can_allocate((), count, scratch):
                return False
            state.table = self.pool.allocate((), count, scratch)
        if not self.pool.can_append(state.table, count, 0):
            return False
        self.pool.append(state.table, count, 0)
        return True

    def _catch_up(self, states: Sequence[EagleState]) -> list[tuple[Array, Array, Array]]:
        """Rows of what was committed since; of each request's last row: log probabilities, tokens, hidden state."""
        lasts: dict[int, tuple[Array, Array, Array]] = {}
        for state in states:  # once drafted, a last row is made again where nothing is new: its keys are the same bytes
            state.fed = min(state.fed, state.kept_to - 1)
        while len(lasts) < len(states):
            row, part = 0, []
            for state in states:
                count = min(state.kept_to - state.fed, self.most_rows - row)
                if id(state) in lasts or count <= 0:
                    continue
                part.append((state, row, count))
                row += count
            if self.fuse is not None:
                for state, first, count in part:
                    self.buffers.taps[first : first + count] = state.hidden(state.fed, state.fed + count)
                self.buffers.header[Header.ROWS] = row
                self.fuse.run()
                self.buffers.features[:row] = self.fuse.tap("features")[:row]
            for seq, (state, first, count) in enumerate(part):
                if self.fuse is None:
                    self.buffers.features[first : first + count] = state.hidden(state.fed, state.fed + count)
                end = first + count
                self.buffers.tokens[first:end] = state.tokens[state.fed + 1 : state.fed + count + 1]
                self.buffers.positions[first:end] = range(state.fed - state.base, state.fed - state.base + count)
                self.buffers.row_slot[first:end] = -1
                self.buffers.ancestors[first:end] = 0
                self._sequence(seq, state, first, count, state.fed - state.base)
                self.buffers.out_rows[seq] = end - 1
            self._run(row, len(part), len(part))
            top, hidden = self.program.tap("top"), self.program.tap("hidden")
            logp, tokens = self.guesses(top[: len(part)])
            for seq, (state, first, count) in enumerate(part):
                state.fed += count
                if state.fed == state.kept_to:
                    lasts[id(state)] = logp[seq], tokens[seq], hidden[first + count - 1].copy()
        return [lasts[id(state)] for state in states]

    def _deepen(self, states: Sequence[EagleState], growths: Sequence[Growth], budgets: Sequence[int], fresh: Sequence[int], floor: float
                ) -> list[int]:
        """Rows for the likeliest nodes that were guessed last (from `fresh[i]` on); where those begin now, empty if none was worth it."""
        row, chosen = 0, []
        share = max(1, self.most_rows // len(states))
        for i, (growth, budget) in enumerate(zip(growths, budgets, strict=True)):
            likely = [node for node in growth.best(budget - 1) if node >= fresh[i]]  # a child of the last place would have none
            likely = sorted(sorted(likely, key=lambda n: (-growth.paths[n], n))[: min(SPREAD, share, self.most_slots - growth.slots)])
            chosen.append((i, row, likely))
            row += len(likely)
        if not row:
            return []
        active = [(i, first, nodes) for i, first, nodes in chosen if nodes]
        words: list[int] = []
        for seq, (i, first, nodes) in enumerate(active):
            state, growth = states[i], growths[i]
            count, committed = len(nodes), state.fed - state.base
            for at, node in enumerate(nodes):
                word = growth.words[node] | (1 << growth.slots)
                words.append(word)
                self.buffers.tokens[first + at] = growth.tokens[node]
                self.buffers.features[first + at] = growth.features[node]
                self.buffers.positions[first + at] = committed + growth.words[node].bit_count()
                self.buffers.row_slot[first + at] = growth.slots
                self.buffers.ancestors[first + at] = word
                growth.slots += 1
            self._sequence(seq, state, first, count, committed)
        self.buffers.out_rows[:row] = range(row)
        self._run(row, len(active), row)
        logp, tokens = self.guesses(self.program.tap("top")[:row])
        hidden = self.program.tap("hidden")[:row].copy()
        starts = [len(growth.tokens) for growth in growths]
        for i, first, nodes in active:
            for at, node in enumerate(nodes):
                growths[i].add(node, logp[first + at], tokens[first + at], hidden[first + at], words[first + at], floor)
        return starts

    def _sequence(self, seq: int, state: EagleState, first: int, count: int, committed: int) -> None:
        buffers, table = self.buffers, state.table
        buffers.row_seq[first : first + count] = seq
        buffers.seq_ctx[seq] = committed
        buffers.seq_row[seq] = first
        buffers.seq_rows[seq] = count
        buffers.page_table[seq, : len(table.pages)] = table.pages
        buffers.scratch_table[seq, : len(table.scratch)] = table.scratch

    def _run(self, rows: int, seqs: int, out: int) -> None:
        header = self.buffers.header
        header[Header.ROWS], header[Header.SEQS], header[Header.OUT], header[Header.COMMITS] = rows, seqs, out, 0
        self.program.run()

    def _tree(self, growth: Growth, budget: int) -> Tree:
        nodes = growth.best(budget)
        if not nodes:
            return EMPTY
        place = {node: i for i, node in enumerate(nodes)} | {-1: -1}
        return Tree(tuple(growth.tokens[n] for n in nodes), tuple(place[growth.parents[n]] for n in nodes),
                    tuple(growth.logq[n] for n in nodes), (self.index,) * len(nodes))
