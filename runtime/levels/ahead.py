"""Levels with programs that draft behind the target's step, for the next one: the list `ahead` makes its rows of what `follow` says has
been committed (runtime/followed.py), before the host knows, so that a step waits for the device once.

What it brings is used if the host comes to the same: as many tokens, and the same last one. If not (the request began anew, or its pages
were taken), it drafts in its own time, as it does for the first draft. Nothing that was committed depends on it (law L1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mlsdc.runtime.device.base import BoundProgram, LevelMemory
from mlsdc.runtime.levels.base import Level, LevelState
from mlsdc.runtime.levels.coupling import Draws
from mlsdc.runtime.levels.grown import AHEAD, Growing, write_record
from mlsdc.runtime.step import SCRATCH_SLOTS, Header, StepBuffers
from mlsdc.runtime.tree import EMPTY, Tree

T = TypeVar("T")


class Follower(LevelState, Generic[T]):
    """A state for which drafts are made ahead."""

    tokens: list[int]
    following = False  # the list was started for it, and nothing that it starts from has become of no use since
    made: tuple[int, int, T] | None = None  # a draft, behind so many positions of the level's, the last of them this token's

    def forget(self) -> None:
        """What was, or is being, drafted ahead is of no use any more."""
        self.made, self.following = None, False

    def made_for(self, end: int) -> T | None:
        """What was drafted ahead, if the request has come to `end` positions by the token that was assumed."""
        return self.made[2] if self.made is not None and self.made[:2] == (end, self.tokens[-1]) else None

    def take(self, end: int) -> T | None:
        """The same, once."""
        found = self.made_for(end)
        self.made = None
        return found


S = TypeVar("S", bound=Follower[Any])


@dataclass(frozen=True)
class Followed(Generic[S]):
    """A sequence of the target's step: its place there, and the level's rows for it, as many as the step can commit."""

    seq: int
    state: S
    first: int
    room: int


@dataclass(frozen=True)
class Found(Generic[S]):
    """What a list has come to for a state: place `at` of its sequences; where its committed rows end; their last token."""

    at: int
    state: S
    end: int
    last: int


class Ahead(Generic[S]):
    """The list of one level, and what it was started for."""

    def __init__(self, memory: LevelMemory, target: LevelMemory) -> None:
        self.program: BoundProgram = memory.programs[AHEAD]
        self.buffers: StepBuffers = memory.buffers
        self.target: StepBuffers = target.buffers
        self.started: list[S] = []

    @staticmethod
    def of(memory: LevelMemory, target: LevelMemory) -> Ahead[S] | None:
        """None where the artifact has no such list for the device."""
        return Ahead(memory, target) if AHEAD in memory.programs else None

    def chosen(self, states: Sequence[LevelState | None], kind: type[S], fits: Callable[[S, int], bool], *, last_only: bool = False
               ) -> list[Followed[S]]:
        """The sequences of the step to follow, while there are rows: `fits(state, room)` says whether the level can go on with one, and
        makes room. With `last_only` a sequence has one row whatever is committed."""
        limits = self.buffers.limits
        left = min(limits.max_num_batched_tokens, limits.max_logit_rows)
        found: list[Followed[S]] = []
        first = 0
        for seq, state in enumerate(states):
            room = self._rows_of(seq, state) if isinstance(state, kind) else 0
            room = min(room, 1) if last_only else room
            if isinstance(state, kind) and 0 < room <= left - first and fits(state, room):
                found.append(Followed(seq, state, first, room))
                first += room
        return found

    def _rows_of(self, seq: int, state: S) -> int:
        """Rows that the step commits of sequence `seq` at most; 0 where that cannot be followed: rows of a prompt."""
        b = self.target
        rows, first = int(b.seq_rows[seq]), int(b.seq_row[seq])
        drafted = b.row_slot[first] >= 0
        if b.seq_out[seq] < 0 or not (drafted or rows == 1) or b.positions[first] != len(state.tokens) - 1:
            return 0
        return min(rows, SCRATCH_SLOTS)

    def start(self, work: Sequence[Followed[S]], values: Sequence[Mapping[Growing, float]], later: int = 0) -> None:
        """Launch, without waiting. `values`: each sequence's record, as if the step committed nothing; `later`: rows of later rounds."""
        for at, (one, of_one) in enumerate(zip(work, values, strict=True)):
            own = {**of_one, Growing.OF: one.seq, Growing.FIRST: one.first, Growing.ROOM: one.room}
            write_record(self.buffers.growth[at], own, one.state.drawn)
            one.state.following = True
        header, count = self.buffers.header, len(work)
        header[Header.ROWS], header[Header.SEQS], header[Header.OUT] = sum(one.room for one in work), count, count
        header[Header.LATER], header[Header.COMMITS], header[Header.GROUPS] = later, 0, 0
        self.program.start()
        self.started = [one.state for one in work]

    def found(self) -> list[Found[S]]:
        """Once the target's step has been waited for: what it came to, of the states that it is of use to. Nothing the second time."""
        if not self.started:
            return []
        self.program.finish()
        states, self.started = self.started, []
        return [Found(at, state, int(self.buffers.grown[at, 1]), int(self.buffers.grown[at, 2]))
                for at, state in enumerate(states) if state.following]


class LooksAhead(Level):
    """A level with a list `ahead`, where the artifact has one for the device."""

    behind: Ahead[Any] | None = None
    draws: Draws

    @property
    def looks_ahead(self) -> bool:
        return self.behind is not None

    def ahead(self, states: Sequence[LevelState | None]) -> None:
        self.collect()
        if self.behind is not None and self.draws.watch is None:
            self.follow(self.behind, states)

    def follow(self, behind: Ahead[Any], states: Sequence[LevelState | None]) -> None:
        """Start the list for those of the step's sequences that the level can go on with."""

    def collect(self) -> None:
        """What the list has come to, once the target's step has been waited for, goes to the states."""


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
