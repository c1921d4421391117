"""Drafting levels for tests: good, bad and hostile ones. None of them may change a text."""

from __future__ import annotations

import random
from collections.abc import Callable

from fake_device import VOCAB, continuation

from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.levels.ngram import NgramLevel
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.tree import EMPTY, Tree, chain
from tests.function_level import FunctionLevel


def oracle(history: list[int], budget: int) -> Tree:
    """Always right."""
    return chain(continuation(history, budget))


def wrong(history: list[int], budget: int) -> Tree:
    """Never right."""
    return chain([(token + 1) % VOCAB for token in continuation(history, budget)])


def half_right(history: list[int], budget: int) -> Tree:
    """Right up to a depth that changes from step to step, then wrong."""
    good = len(history) % (budget + 1)
    return chain([token if i < good else (token + 1) % VOCAB for i, token in enumerate(continuation(history, budget))])


def random_trees(seed: int) -> FunctionLevel:
    """Trees of random shape, about half of whose nodes are what the target would say there."""

    def propose(history: list[int], budget: int) -> Tree:
        rng = random.Random(f"{seed} {history}")
        count = rng.randint(0, budget)
        tokens: list[int] = []
        parents: list[int] = []
        for i in range(count):
            parent = rng.randint(-1, i - 1) if rng.random() < 0.5 else i - 1
            path: list[int] = []
            at = parent
            while at >= 0:
                path.append(tokens[at])
                at = parents[at]
            right = continuation([*history, *reversed(path)], 1)[0]
            tokens.append(right if rng.random() < 0.5 else rng.randrange(VOCAB))
            parents.append(parent)
        return Tree(tuple(tokens), tuple(parents), (0.0,) * count, (0,) * count)

    return FunctionLevel(propose)


def hostile(history: list[int], budget: int) -> Tree:
    """Tokens outside the vocabulary, more nodes than allowed, or nothing."""
    case = len(history) % 4
    if case == 0:
        return chain([VOCAB + 5] * budget)
    if case == 1:
        return chain([-1] * budget)
    if case == 2:
        return chain(continuation(history, budget + 3))
    return EMPTY


def ngram(**params: float) -> NgramLevel:
    return NgramLevel(LevelInfo("ngram", "ngram", params), 0)


LEVELS: dict[str, Callable[[], Level]] = {
    "oracle": lambda: FunctionLevel(oracle),
    "wrong": lambda: FunctionLevel(wrong),
    "half_right": lambda: FunctionLevel(half_right),
    "random_trees": lambda: random_trees(0),
    "hostile": lambda: FunctionLevel(hostile),
    "ngram_tree": lambda: ngram(),
    "ngram_chain": lambda: ngram(width=1),
}
