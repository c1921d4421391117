"""The n-gram level: counts over one request's prompt and output (live) and over the target's own text (static, counts.py), which propose
what usually came next.

An interpolated model over contexts of 0..order tokens (Witten-Bell: with c the count of w after a context, n the context's total, u the
number of different tokens seen after it, p' the estimate of the context one token shorter, 0 below the shortest)

    p(w) = (c + u * p'(w)) / (n + u)

where c, n and u are `live_weight` times the live count plus the static one; a context that neither knows is passed over. On it runs
a best-first search: the tree of the most probable paths within the node budget. A context remembers the `FOLLOWERS` most
frequent tokens after it, of equals the latest, so the cost of a tree does not depend on the history.

An artifact brings the same in native code (ngram_native.py). The state here is what that code is compared with, value for value, and
serves devices without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np

from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.levels.base import Level, LevelState
from mlsdc.runtime.levels.counts import Counts
from mlsdc.runtime.levels.coupling import Draw
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.sampling.noise import gumbel
from mlsdc.runtime.tree import EMPTY, MAX_NODES, Tree

FOLLOWERS = 6  # of a context, those a proposal looks at (templates/tir/ngram.jinja)
DRAWN = 0.004  # tokens less likely than this are not looked up among the draws
WAITING = 128  # most candidates of a search
DEFAULTS: dict[str, float] = {"order": 4, "max_nodes": 16, "width": FOLLOWERS, "min_probability": 0.0, "live_weight": 1.0}
MAX_WIDTH = 8
RANGES = (("order", 1, 8), ("max_nodes", 1, MAX_NODES), ("width", 1, MAX_WIDTH), ("min_probability", 0, 1), ("live_weight", 0.01, 1000))


class NgramLevel(Level):
    """params: `order` (longest context), `max_nodes`, `width` (most children of a node; 1 makes chains), `min_probability` of a path,
    `live_weight` (of one count of the request, in counts of the static table)."""

    kind = "ngram"

    def __init__(self, info: LevelInfo, index: int = 0, counts: Counts | None = None) -> None:
        self.name = info.name
        self.index = index
        values = {**DEFAULTS, **{key: info.params[key] for key in DEFAULTS if key in info.params}}
        for key, low, high in RANGES:
            value = values[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise ArtifactError(f"level '{info.name}': {key} is {value!r}, expected {low} to {high}")
        self.order = int(values["order"])
        self.max_nodes = int(values["max_nodes"])
        self.width = int(values["width"])
        self.min_probability = float(values["min_probability"])
        self.live_weight = float(values["live_weight"])
        self.counts = Counts.none() if counts is None else counts

    def start(self) -> LevelState:
        return NgramState(self)

    def tree(self, tokens: Sequence[int], parents: Sequence[int], probabilities: Sequence[float]) -> Tree:
        if not tokens:
            return EMPTY
        return Tree(tuple(tokens), tuple(parents), tuple(map(log, probabilities)), (self.index,) * len(tokens))


class _Record:
    """What came after one context: `top` are (token, count), most frequent first, of equals the latest first."""

    __slots__ = ("distinct", "top", "total")

    def __init__(self) -> None:
        self.total = self.distinct = 0
        self.top: list[tuple[int, int]] = []


class NgramState(LevelState):
    def __init__(self, level: NgramLevel) -> None:
        self.level = level
        self.history: list[int] = []
        self.records: dict[tuple[int, ...], _Record] = {}
        self.pairs: dict[tuple[int, ...], int] = {}  # (*context, token) -> count
        self.seed: int | None = None
        self.journal: list[list[tuple[int, tuple[int, int]]]] = []  # per token and context: its old place, who had to leave

    def observe(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            undo = []
            for context in self._contexts(self.history):
                count = self.pairs[*context, token] = self.pairs.get((*context, token), 0) + 1
                record = self.records.setdefault(context, _Record())
                record.total += 1
                record.distinct += count == 1
                undo.append(_raise(record.top, token, count))
            self.journal.append(undo)
            self.history.append(token)

    def rollback(self, num_tokens: int) -> None:
        for _ in range(min(num_tokens, len(self.history))):
            token = self.history.pop()
            undo = self.journal.pop()
            for context, (place, gone) in zip(self._contexts(self.history), undo, strict=True):
                record = self.records[context]
                count = self.pairs[*context, token]
                _lower(record.top, token, count, place, gone)
                record.total -= 1
                record.distinct -= count == 1
                if count > 1:
                    self.pairs[*context, token] = count - 1
                else:
                    del self.pairs[*context, token]
                if not record.total:
                    del self.records[context]

    def couple(self, draw: Draw) -> None:
        self.seed = draw.seed

    def propose(self, budget: int) -> Tree:
        level = self.level
        budget = min(budget, level.max_nodes)
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        waiting: list[tuple[np.float32, np.float32, int, int]] = []  # (path, own, token, parent), best last, of equals the older
        children: dict[int, int] = {}
        node, path = -1, np.float32(1)
        context = list(self.history[-level.order :])
        contexts, depths = {-1: context}, {-1: 0}
        while budget > 0:
            for own, token in self._drawn(self._followers(contexts[node]), len(self.history) + depths[node]):
                score = path * own
                if score < level.min_probability or score <= 0 or (len(waiting) == WAITING and score <= waiting[0][0]):
                    continue
                if len(waiting) == WAITING:
                    del waiting[0]
                at = len(waiting)
                while at > 0 and waiting[at - 1][0] >= score:
                    at -= 1
                waiting.insert(at, (score, own, token, node))
            while waiting and children.get(waiting[-1][3], 0) >= level.width:
                waiting.pop()
            if not waiting:
                break
            path, own, token, parent = waiting.pop()
            node = len(tokens)
            depths[node] = depths[parent] + 1
            children[parent] = children.get(parent, 0) + 1
            contexts[node] = [*contexts[parent], token][-level.order :]
            tokens.append(token)
            parents.append(parent)
            probabilities.append(float(own))
            if len(tokens) == budget:
                break
        return level.tree(tokens, parents, probabilities)

    def guesses(self) -> tuple[list[tuple[np.float32, int]], int]:
        """(probability, token) of all that may follow the history, and which of them comes first; -1: none."""
        followers = self._followers(self.history[-self.level.order :])
        return followers, max(self._drawn(followers, len(self.history)))[1] if followers else -1

    def _drawn(self, followers: Sequence[tuple[np.float32, int]], position: int) -> list[tuple[np.float32, int]]:
        """Chances that the tokens are drawn at `position`, if the request draws: p / E over the sum of all, E the draws of law L1."""
        if self.seed is None or not followers:
            return list(followers)
        rest = max(0.0, 1 - sum(float(p) for p, _ in followers))
        draws = np.exp(-gumbel(self.seed, position, np.array([token for _, token in followers])))
        weights = [float(p) / float(draw) if p >= np.float32(DRAWN) else float(p) for (p, _), draw in zip(followers, draws, strict=True)]
        return [(np.float32(w / (sum(weights) + rest)), token) for w, (_, token) in zip(weights, followers, strict=True)]

    def _contexts(self, history: Sequence[int]) -> list[tuple[int, ...]]:
        """The last 0..order tokens."""
        deepest = min(self.level.order, len(history))
        return [tuple(history[len(history) - k :]) for k in range(deepest + 1)]

    def _followers(self, context: Sequence[int]) -> list[tuple[np.float32, int]]:
        """(probability, token) of what may follow, in f32, in order of first sight from the shortest context on."""
        estimates: dict[int, np.float32] = {}
        level = self.level
        weight = np.float32(level.live_weight)
        for shorter in self._contexts(context):
            live, fixed = self.records.get(shorter), level.counts.find(shorter)
            total = np.float32(fixed.total if fixed else 0) + np.float32(live.total if live else 0) * weight
            unseen = np.float32(fixed.distinct if fixed else 0) + np.float32(live.distinct if live else 0) * weight
            if total == 0:
                continue
            scale = np.float32(1) / (total + unseen)
            for token in estimates:
                estimates[token] *= unseen * scale
            for top, each in ((live.top if live else (), weight * scale), (fixed.top if fixed else (), scale)):
                for token, count in top:
                    estimates[token] = np.float32(count * float(each) + float(estimates.get(token, np.float32(0))))
        return [(p, token) for token, p in estimates.items()]


def _raise(top: list[tuple[int, int]], token: int, count: int) -> tuple[int, tuple[int, int]]:
    """Give `token` its new count and place; returns what `_lower` needs: the old place and who had to leave, (-1, 0) nobody."""
    place = next((i for i, (other, _) in enumerate(top) if other == token), FOLLOWERS)
    if place < FOLLOWERS:
        del top[place]
    new = sum(other > count for _, other in top)
    if new == FOLLOWERS:
        return place, (-1, 0)
    top.insert(new, (token, count))
    return place, top.pop() if len(top) > FOLLOWERS else (-1, 0)


def _lower(top: list[tuple[int, int]], token: int, count: int, place: int, gone: tuple[int, int]) -> None:
    if (token, count) not in top:
        return
    top.remove((token, count))
    if place < FOLLOWERS:
        top.insert(place, (token, count - 1))
    elif gone[0] >= 0:
        top.append(gone)
