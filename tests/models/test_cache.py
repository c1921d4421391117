"""Families through the paged cache: chunks give the full pass's logits, a tree those of its paths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mlsdc.compiler.graph import Graph
from mlsdc.compiler.interpret import KvState, StepTree, interpret
from mlsdc.runtime.tree import Tree, ancestor_words
from tests.models.tiny import LIMITS, PAGE, after, hf_model, proven_by, tokens_for, weights_of
from tests.passes.graphs import geometry_of

PAGES = LIMITS.max_model_len // PAGE
LENGTH = 80  # beyond longrope's original context: transformers takes its long factors, as we compile for
COMMITTED = 44  # beyond the tiny windows, and not a whole page
CHUNKS = (0, 17, 40, 41, COMMITTED)
TREE = Tree((7, 99, 7, 30, 201), (-1, -1, 0, 0, 2))
ROUNDING = 2e-2  # of the logits' spread: keys and values are bf16 in the cache


class Steps:
    """One sequence served step by step by the reference interpreter."""

    def __init__(self, name: str) -> None:
        self.graph: Graph = after(name, "share-tree-mask")
        self.weights = weights_of(name)
        self.kv = KvState.empty(geometry_of(self.graph), PAGES + 1)

    def run(self, tokens: Any, positions: list[int], slots: list[int], words: list[int], ctx: int) -> torch.Tensor:
        rows = len(positions)
        tree = StepTree(
            np.array(positions, np.int32), np.zeros(rows, np.int32), np.array(slots, np.int32), np.array(words, np.uint64),
            np.array([ctx], np.int32), np.arange(PAGES, dtype=np.int32)[None], np.array([[PAGES]], np.int32))
        inputs = {"tokens": np.array(tokens, np.int32), "positions": tree.positions, "out_rows": np.arange(rows, dtype=np.int32)}
        found = interpret(self.graph, inputs | {"tree": tree, "kv": self.kv}, self.weights)
        logits = found["logits"]
        assert isinstance(logits, torch.Tensor)
        if slots[0] < 0:
            assert isinstance(found["kv"], KvState)
            self.kv = found["kv"]
        return logits

    def commit(self, tokens: Any, start: int) -> torch.Tensor:
        """Rows that are committed as they enter."""
        end = start + len(tokens)
        return self.run(tokens, list(range(start, end)), [-1] * len(tokens), [0] * len(tokens), start)

    def verify(self, last: int, tree: Tree, start: int) -> torch.Tensor:
        """The last token and a tree of drafts behind it; leaves no trace."""
        positions = [start, *(start + depth for depth in tree.depths())]
        return self.run([last, *tree.tokens], positions, list(range(len(tree) + 1)), list(ancestor_words(tree)), start)


@pytest.mark.parametrize("name", proven_by("cache"))
@torch.no_grad()
def test_chunks_give_the_full_pass_and_a_tree_gives_its_paths(name: str) -> None:
    sequence = tokens_for(name, LENGTH)
    wanted = hf_model(name)(sequence[None]).logits[0, : COMMITTED + 1]
    tokens = sequence[: COMMITTED + 1].numpy()
    steps = Steps(name)
    chunked = torch.cat([steps.commit(tokens[a:b], a) for a, b in zip(CHUNKS, CHUNKS[1:], strict=False)])
    assert (chunked - wanted[:COMMITTED]).abs().max() < ROUNDING * wanted.std() * 4

    verified = steps.verify(int(tokens[-1]), TREE, COMMITTED)
    assert (verified[0] - wanted[-1]).abs().max() < ROUNDING * wanted.std() * 4
    for node in range(len(TREE)):
        path = [node]
        while TREE.parents[path[0]] >= 0:
            path.insert(0, TREE.parents[path[0]])
        chain = Steps(name)
        whole = chain.commit([*tokens, *(TREE.tokens[i] for i in path)], 0)
        torch.testing.assert_close(verified[node + 1], whole[-1], rtol=0, atol=ROUNDING * float(wanted.std()))
