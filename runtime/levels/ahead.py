"""Levels with programs that draft behind the target's step, for the next one: the list `ahead` makes its rows of what `follow` says has
been committed (runtime/followed.py), before the host knows, so that a step waits for the device once.

What it brings is used if the host comes to the same: as many tokens, and the same last one. If not (the request began anew, or its pages
were taken), it drafts in its own time, as it does for the first draft. Nothing that was committed depends on it (law L1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from mlsdc.runtime.device.base import BoundProgram, LevelMemory
from mlsdc.runtime.levels.coupling import Draw
from mlsdc.runtime.levels.grown import AHEAD, GROWN_WORDS, Growing, write_record
from mlsdc.runtime.step import SCRATCH_SLOTS, Array, Header, StepBuffers
from mlsdc.runtime.tree import EMPTY, Tree


class Waiting(Protocol):
    """A state that may have something drafted ahead."""

    tokens: list[int]
    drawn: Draw | None
    following: bool  # since the list was started for it nothing has become of no use


S = TypeVar("S", bound=Waiting)


class Ahead(Generic[S]):
    """The list of one level, and what it was started for."""

    def __init__(self, memory: LevelMemory, target: LevelMemory) -> None:
        self.program: BoundProgram = memory.programs[AHEAD]
        self.buffers: StepBuffers = memory.buffers
        self.target: StepBuffers = target.buffers
        limits = memory.buffers.limits
        self.most_rows = min(limits.max_num_batched_tokens, limits.max_logit_rows)
        self.started: list[S] = []

    @staticmethod
    def of(memory: LevelMemory, target: LevelMemory) -> Ahead[S] | None:
        """None where the artifact has no such list for the device."""
        return Ahead(memory, target) if AHEAD in memory.programs else None

    def rows_of(self, seq: int, state: S) -> int:
        """Rows that the step commits of sequence `seq` at most; 0 where that cannot be followed: rows of a prompt."""
        b = self.target
        rows, first = int(b.seq_rows[seq]), int(b.seq_row[seq])
        drafted = b.row_slot[first] >= 0
        if b.seq_out[seq] < 0 or not (drafted or rows == 1) or b.positions[first] != len(state.tokens) - 1:
            return 0
        return min(rows, SCRATCH_SLOTS)

    def write(self, at: int, seq: int, state: S, first: int, room: int, values: Mapping[Growing, float]) -> None:
        """The record of this list's sequence `at`, which is the step's `seq`, whose rows begin at `first`; `values` are as if nothing were
        committed."""
        write_record(self.buffers.growth[at], {**values, Growing.OF: seq, Growing.FIRST: first, Growing.ROOM: room}, state.drawn)

    def start(self, states: Sequence[S], rows: int, later: int) -> None:
        header = self.buffers.header
        header[Header.ROWS], header[Header.SEQS], header[Header.OUT], header[Header.LATER] = rows, len(states), len(states), later
        header[Header.COMMITS] = header[Header.GROUPS] = 0
        self.program.start()
        self.started = list(states)
        for state in states:
            state.following = True

    def found(self) -> list[tuple[S, int, int, Array]]:
        """Once the target's step has been waited for: of each state that the list was started for and is of use to, where its committed
        rows end, its last token, and its words of `grown`. Nothing the second time."""
        if not self.started:
            return []
        self.program.finish()
        states, self.started = self.started, []
        grown = self.buffers.grown[: len(states), :GROWN_WORDS].copy()
        return [(state, int(words[1]), int(words[2]), words) for state, words in zip(states, grown, strict=True)
                if state.following]


def likeliest(tree: Tree, count: int) -> Tree:
    """The `count` nodes with the likeliest paths: parents come before children, for no child is likelier than its parent."""
    if len(tree) <= count:
        return tree
    if count <= 0:
        return EMPTY
    paths: list[float] = []
    for parent, logq in zip(tree.parents, tree.logq, strict=True):
        paths.append(logq + (paths[parent] if parent >= 0 else 0.0))
    return tree.select(sorted(sorted(range(len(tree)), key=lambda i: (-paths[i], i))[:count]))
