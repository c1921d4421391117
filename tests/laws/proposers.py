"""Drafting levels that know the right text, or a wrong one. None of them may change what is said (law L1)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mlsdc.runtime.tree import EMPTY, MAX_NODES, Tree, chain
from tests.function_level import FunctionLevel, Propose


class Known:
    """Texts the target is known to say: what comes after a history is looked up in them."""

    def __init__(self, texts: Sequence[Sequence[int]], vocab: int) -> None:
        self.vocab = vocab
        self.texts = [list(text) for text in texts]

    def after(self, history: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens; where the texts end or say otherwise, some token."""
        found: list[int] = next((t[len(history) : len(history) + count] for t in self.texts if t[: len(history)] == list(history)), [])
        return found + [len(history) % self.vocab] * (count - len(found))

    def perfect(self, history: list[int], budget: int) -> Tree:
        return chain(self.after(history, budget))

    def wrong(self, history: list[int], budget: int) -> Tree:
        return chain([(token + 1) % self.vocab for token in self.after(history, budget)])

    def half(self, history: list[int], budget: int) -> Tree:
        """Right up to a depth that changes from step to step."""
        good = len(history) % (budget + 1)
        return chain([t if i < good else (t + 1) % self.vocab for i, t in enumerate(self.after(history, budget))])

    def trees(self, history: list[int], budget: int) -> Tree:
        """Random shapes; about half of the nodes are what the target says after their path, if the path is right."""
        rng = random.Random(f"{len(history)} {history[-3:]}")
        right = self.after(history, budget)
        tokens, parents, depths, on_path = list[int](), list[int](), list[int](), list[bool]()
        for i in range(rng.randint(0, budget)):
            parent = rng.randint(-1, i - 1) if rng.random() < 0.5 else i - 1
            depth = depths[parent] + 1 if parent >= 0 else 0
            true = (parent < 0 or on_path[parent]) and rng.random() < 0.7
            tokens.append(right[depth] if true else rng.randrange(self.vocab))
            parents.append(parent)
            depths.append(depth)
            on_path.append(true)
        return Tree(tuple(tokens), tuple(parents), (0.0,) * len(tokens), (0,) * len(tokens))

    def twins(self, history: list[int], budget: int) -> Tree:
        """The right chain behind wrong siblings, and the same right token twice."""
        tokens, parents, last = list[int](), list[int](), -1
        for token in self.after(history, budget):
            for sibling in ((token + 1) % self.vocab, token, token)[: max(0, budget - len(tokens))]:
                tokens.append(sibling)
                parents.append(last)
            last = len(tokens) - 2 if len(tokens) >= 2 else -1
            if len(tokens) >= budget:
                break
        return Tree(tuple(tokens), tuple(parents), (0.0,) * len(tokens), (0,) * len(tokens))

    def hostile(self, history: list[int], budget: int) -> Tree:
        """Ids outside of the vocabulary, more nodes than allowed, nothing at all."""
        case = len(history) % 5
        if case == 0:
            return chain([self.vocab] * budget)
        if case == 1:
            return chain([-1] * budget)
        if case == 2:
            return chain(self.after(history, min(MAX_NODES, budget + 3)))
        return EMPTY if case == 3 else self.trees(history, budget)

    def level(self, name: str) -> FunctionLevel:
        function: Propose = getattr(self, name)
        return FunctionLevel(function, "lookup")


PROPOSERS = ("perfect", "wrong", "half", "trees", "twins", "hostile")
