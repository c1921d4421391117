"""The n-gram level's live half: counts over one request's prompt and output, which propose what usually came next.

An interpolated model over contexts of 1..order tokens (Witten-Bell: with c the count of w after a context, n the context's total, u the
number of different tokens seen after it, p' the estimate of the context one token shorter, 0 below the shortest)

    p(w) = (c + u * p'(w)) / (n + u)

and a best-first search over it: the tree of the most probable paths within the node budget. Counts are updated token by token, so the
cost of a step does not depend on the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import log

from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.levels.base import Level, LevelState
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.tree import EMPTY, MAX_NODES, Tree

MAX_FOLLOWERS = 8  # per context, those a proposal looks at
DEFAULTS: dict[str, float] = {"order": 4, "max_nodes": 16, "width": MAX_FOLLOWERS, "min_probability": 0.1}


class NgramLevel(Level):
    """params: `order` (longest context), `max_nodes`, `width` (most children of a node; 1 makes chains), `min_probability` of a path."""

    kind = "ngram"

    def __init__(self, info: LevelInfo, index: int = 0) -> None:
        self.name = info.name
        self.index = index
        values = {**DEFAULTS, **{key: info.params[key] for key in DEFAULTS if key in info.params}}
        for key, low, high in (("order", 1, 8), ("max_nodes", 1, MAX_NODES), ("width", 1, MAX_FOLLOWERS), ("min_probability", 0, 1)):
            value = values[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise ArtifactError(f"level '{info.name}': {key} is {value!r}, expected {low} to {high}")
        self.order = int(values["order"])
        self.max_nodes = int(values["max_nodes"])
        self.width = int(values["width"])
        self.min_probability = float(values["min_probability"])

    def start(self) -> NgramState:
        return NgramState(self)


class _Followers:
    """What came after one context. `top` are the followers a proposal looks at, the latest seen last."""

    __slots__ = ("counts", "top", "total")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.top: list[int] = []
        self.total = 0

    def add(self, token: int) -> tuple[int, int, int]:
        """Count `token`; returns what `undo` needs: its old place in `top` (-1: none) and who had to leave (place, token; -1: nobody)."""
        counts, top = self.counts, self.top
        self.total += 1
        counts[token] = counts.get(token, 0) + 1
        if token in top:
            place = top.index(token)
            del top[place]
            top.append(token)
            return place, -1, -1
        top.append(token)
        if len(top) <= MAX_FOLLOWERS:
            return -1, -1, -1
        gone = min(range(MAX_FOLLOWERS), key=lambda i: counts[top[i]])  # the rarest, of those the oldest; never the one just seen
        return -1, gone, top.pop(gone)

    def undo(self, token: int, place: int, gone: int, gone_token: int) -> None:
        self.total -= 1
        self.counts[token] -= 1
        if not self.counts[token]:
            del self.counts[token]
        self.top.pop()
        if gone >= 0:
            self.top.insert(gone, gone_token)
        if place >= 0:
            self.top.insert(place, token)


class NgramState(LevelState):
    def __init__(self, level: NgramLevel) -> None:
        self.level = level
        self.history: list[int] = []
        self.tables: list[dict[tuple[int, ...], _Followers]] = [{} for _ in range(level.order)]  # [k - 1]: contexts of k tokens
        self.journal: list[tuple[tuple[int, int, int], ...]] = []  # per observed token, what each table needs to undo it

    def observe(self, tokens: Sequence[int]) -> None:
        history, tables = self.history, self.tables
        for token in tokens:
            undo = []
            context = tuple(history[-len(tables):])
            for k in range(1, len(context) + 1):
                table, key = tables[k - 1], context[-k:]
                followers = table.get(key)
                if followers is None:
                    followers = table[key] = _Followers()
                undo.append(followers.add(token))
            self.journal.append(tuple(undo))
            history.append(token)

    def rollback(self, num_tokens: int) -> None:
        history, tables = self.history, self.tables
        for _ in range(min(num_tokens, len(history))):
            token = history.pop()
            context = tuple(history[-len(tables):])
            for k, undo in enumerate(self.journal.pop(), 1):
                key = context[-k:]
                followers = tables[k - 1][key]
                followers.undo(token, *undo)
                if not followers.total:
                    del tables[k - 1][key]

    def propose(self, budget: int) -> Tree:
        level = self.level
        budget = min(budget, level.max_nodes)
        if budget <= 0 or not self.history:
            return EMPTY
        order, width, floor = level.order, level.width, level.min_probability
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        # (-probability of the path, age, parent node, token, own probability, context before the token); age keeps it deterministic
        heap: list[tuple[float, int, int, int, float, tuple[int, ...]]] = []
        age = 0
        node, path, context = -1, 1.0, tuple(self.history[-order:])
        while True:
            for p, token in self._followers(context)[:width]:
                if path * p < floor or p <= 0:
                    break
                heappush(heap, (-path * p, age, node, token, p, context))
                age += 1
            if not heap:
                break
            negative, _, parent, token, p, before = heappop(heap)
            node, path, context = len(tokens), -negative, (*before, token)[-order:]
            tokens.append(token)
            parents.append(parent)
            probabilities.append(p)
            if len(tokens) == budget:
                break
        if not tokens:
            return EMPTY
        return Tree(tuple(tokens), tuple(parents), tuple(map(log, probabilities)), (level.index,) * len(tokens))

    def _followers(self, context: tuple[int, ...]) -> list[tuple[float, int]]:
        """(probability, token) of what may follow, most probable first; of equals the smaller token first."""
        estimates: dict[int, float] = {}
        for k in range(1, len(context) + 1):
            followers = self.tables[k - 1].get(context[-k:])
            if followers is None:
                break  # a longer context cannot be known either
            counts, unseen = followers.counts, len(followers.counts)
            scale = 1.0 / (followers.total + unseen)
            for token in estimates:
                estimates[token] *= unseen * scale
            for token in followers.top:
                estimates[token] = estimates.get(token, 0.0) + counts[token] * scale
        return sorted(((p, token) for token, p in estimates.items()), key=_by_probability)


def _by_probability(item: tuple[float, int]) -> tuple[float, int]:
    return -item[0], item[1]
