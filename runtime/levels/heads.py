"""What levels of trained heads share: the target's last hidden states of each request, and trees of the likeliest paths.

A head's row t is made of the target's hidden state at position t and the token at t + 1, which is known as soon as t + 1 is committed. The
hidden states of committed rows are copied from the target's taps after every step into a ring of the last `window` positions, whether the
head drafts or not: after a stretch without drafts, a preemption or a reused prefix it goes on with what the ring holds (law L4).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.base import LevelMemory, NativeFunction
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.kv_pool import KvPool
from mlsdc.runtime.levels.ahead import Ahead, Follower, LooksAhead
from mlsdc.runtime.levels.base import LevelState, Rounds, finished
from mlsdc.runtime.levels.coupling import Draws
from mlsdc.runtime.levels.growing import draft_ids
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.step import Array
from mlsdc.runtime.tree import EMPTY, Tree


class HeadLevel(LooksAhead):
    """`d2t` i32[draft_vocab]: the target's ids. `memory` and what else `bind` gives are there from then on."""

    reads_target = True

    def __init__(self, info: LevelInfo, index: int, d2t: Array, draws: Draws) -> None:
        """Raises ArtifactError for params that no compile writes."""
        self.name, self.kind, self.index = info.name, info.kind, index
        try:
            self.taps = tuple(int(tap) for tap in info.params["taps"])
            self.max_nodes, self.depth, self.window = (int(info.params[key]) for key in ("max_nodes", "depth", "window"))
            self.floor = float(info.params["min_probability"])
            self.width = int(info.params["tap_width"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"level '{info.name}': its params are not a head's ({error}); compile again") from None
        self.d2t = d2t
        self.draws = draws
        self.counters = {"restarts": 0}  # how often a request's context began anew at the ring's first state

    @classmethod
    def load(cls, info: LevelInfo, index: int, functions: Callable[[str], NativeFunction | None], artifact: Artifact) -> HeadLevel:
        """Raises ArtifactError."""
        ids = draft_ids(info, artifact)
        if ids is None:
            raise ArtifactError(f"level '{info.name}': has no draft vocabulary; compile again")
        return cls(info, index, ids, Draws(functions))

    def bind(self, memory: LevelMemory, target: LevelMemory, pool: KvPool | None) -> None:
        self.memory, self.pool = memory, pool
        self.behind = Ahead.of(memory, target)
        self.buffers = memory.buffers
        self._forward = target.programs["forward"]

    def stepped(self, states: Sequence[LevelState | None], firsts: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        self.collect()
        taps = [self._forward.tap(f"hidden.{tap}") for tap in self.taps]
        for state, first, of_item in zip(states, firsts, rows, strict=True):
            if isinstance(state, HeadState) and len(of_item):
                state.keep(first, [tap[list(of_item)] for tap in taps])

    def propose_all(self, states: Sequence[LevelState], budgets: Sequence[int]) -> list[Tree]:
        return finished(self.propose_rounds(states, budgets))

    def propose_rounds(self, states: Sequence[LevelState], budgets: Sequence[int]) -> Rounds[list[Tree]]:
        trees: list[Tree] = [EMPTY] * len(states)
        ready = [i for i, state in enumerate(states) if isinstance(state, HeadState) and budgets[i] > 0 and state.ready()]
        if ready:
            found = yield from self.draft(
                [states[i] for i in ready], [min(budgets[i], self.max_nodes) for i in ready])  # type: ignore[misc]
            for i, tree in zip(ready, found, strict=True):
                trees[i] = tree
        return trees

    @abstractmethod
    def draft(self, states: Sequence[HeadState], budgets: Sequence[int]) -> Rounds[list[Tree]]:
        """Trees of requests that are ready, all of them at once."""


class HeadState(Follower[Any]):
    """One request: its tokens, and hidden states of positions `kept_from` .. `kept_to` - 1 in a ring (position p at row p % window)."""

    def __init__(self, level: HeadLevel) -> None:
        self.level = level
        self.tokens: list[int] = []
        self.ring: Array = np.zeros((0, level.width), np.float32)
        self.kept_from = self.kept_to = 0

    def observe(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def rollback(self, num_tokens: int) -> None:
        self.forget()
        del self.tokens[max(0, len(self.tokens) - num_tokens) :]
        self.kept_to = min(self.kept_to, max(self.kept_from, len(self.tokens) - 1))

    def propose(self, budget: int) -> Tree:
        return self.level.propose_all([self], [budget])[0]

    def keep(self, first: int, parts: Sequence[Array]) -> None:
        """Hidden states of positions `first` and on. Those that are there already are the same ones (law L2); a gap begins anew."""
        count, window = len(parts[0]), self.level.window
        end = first + count
        if end <= self.kept_to and first >= self.kept_from:
            return
        if not self.kept_from <= first <= self.kept_to:
            self.kept_from = self.kept_to = first
            self.restart()
        if len(self.ring) < window:
            self._grow(min(window, end - self.kept_from))
        start = max(first, self.kept_to, end - len(self.ring))
        places = np.arange(start, end) % len(self.ring)
        column = 0
        for part in parts:
            self.ring[places, column : column + part.shape[1]] = part[start - first :]
            column += part.shape[1]
        self.kept_to = end
        self.kept_from = max(self.kept_from, end - len(self.ring))

    def _grow(self, needed: int) -> None:
        """A ring for `needed` positions at least; what is kept moves to its new rows."""
        if needed <= len(self.ring):
            return
        size = min(self.level.window, max(64, 1 << (needed - 1).bit_length()))
        ring = np.zeros((size, self.level.width), np.float32)
        kept = np.arange(self.kept_from, self.kept_to)
        if len(kept):
            ring[kept % size] = self.ring[kept % len(self.ring)]
        self.ring = ring

    def hidden(self, first: int, end: int) -> Array:
        """f32[end - first, width] of positions that are kept."""
        return self.ring[np.arange(first, end) % len(self.ring)]

    def ready(self) -> bool:
        """All committed tokens but the last have their hidden states: the next guess is the one after the last token."""
        return self.kept_to == len(self.tokens) - 1 and self.kept_to > self.kept_from

    def restart(self) -> None:
        """What was made of earlier hidden states is of no use any more."""
        self.forget()


def best_first(budget: int, floor: float, roots: Array, expand: Callable[[int], Array | None]) -> tuple[list[int], list[int], list[float]]:
    """The likeliest paths of a tree whose node at depth d has the guesses `expand(d)`, whatever lies above it: (ranks, parents, logq).

    `roots` and what `expand` gives are log probabilities, best first. A node's rank says which guess of its depth it is.
    """
    from heapq import heappop, heappush

    bound = np.log(floor) if floor > 0 else -np.inf
    heap: list[tuple[float, int, int, int, int]] = []  # (-path, order, parent, rank, depth)
    order = 0
    ranks: list[int] = []
    parents: list[int] = []
    logq: list[float] = []

    def push(path: float, parent: int, rank: int, depth: int, options: Array) -> None:
        nonlocal order
        if rank < len(options) and path + options[rank] >= bound and np.isfinite(options[rank]):
            heappush(heap, (-(path + float(options[rank])), order, parent, rank, depth))
            order += 1

    levels: list[Array | None] = [roots]
    paths: dict[int, float] = {-1: 0.0}
    push(0.0, -1, 0, 0, roots)
    while heap and len(ranks) < budget:
        negative, _, parent, rank, depth = heappop(heap)
        options = levels[depth]
        assert options is not None
        node = len(ranks)
        ranks.append(rank)
        parents.append(parent)
        logq.append(float(options[rank]))
        paths[node] = -negative
        push(paths[parent], parent, rank + 1, depth, options)
        if depth + 1 == len(levels):
            levels.append(expand(depth + 1))
        below = levels[depth + 1]
        if below is not None:
            push(paths[node], node, 0, depth + 1, below)
    return ranks, parents, logq
