"""Kernels that work behind a step's choices, through Triton's interpreter, against the host's code:
`python -m tests.targets.interpret_ahead FUNCTION:TIMES`, a function of this file. Raises AssertionError where they differ.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

import numpy as np

from mlsdc.runtime import followed as F
from mlsdc.runtime.request import Request, StepItem
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.step import Limits, StepBuffers
from mlsdc.runtime.tree import Tree, walk
from mlsdc.runtime.verify import write_rows
from mlsdc.targets.nvidia_ahead import follow_lowering
from tests.targets.triton_machine import TritonMachine

LIMITS = Limits(max_model_len=256, max_num_seqs=6, max_num_batched_tokens=256, max_logit_rows=256, max_tree_nodes=63)
POISON = 0x7F7F7F7F


def random_tree(rng: random.Random, nodes: int, vocab: int) -> Tree:
    return Tree(tuple(rng.randrange(vocab) for _ in range(nodes)), tuple(rng.randrange(-1, i) for i in range(nodes)))


def random_items(rng: random.Random, vocab: int) -> list[StepItem]:
    """A step of sequences that draft, decode plainly, or compute a prompt's chunk, the last one or not, or report it."""
    items = []
    for kind in rng.choices(("tree", "full", "plain", "chunk", "last", "reported"), k=rng.randint(1, LIMITS.max_num_seqs)):
        params = SamplingParams(prompt_logprobs=0) if kind == "reported" else SamplingParams()
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(12, 30))]
        request = Request(prompt, params, max_length=200, stop_ids=frozenset(), budget=8)
        decodes = kind in ("tree", "full", "plain")
        request.num_computed = len(request.tokens) - 1 if decodes else rng.randint(0, 3)
        left = len(request.tokens) - request.num_computed
        item = StepItem(request, 1 if decodes else left if kind == "last" else rng.randint(1, left - 1), decodes=decodes)
        if kind in ("tree", "full"):
            full = kind == "full" and not any(len(other.tree) == 63 for other in items)
            item.tree = random_tree(rng, 63 if full else rng.randint(1, 9), vocab)
        items.append(item)
    return items


def follow(machine: TritonMachine, seed: int) -> None:
    """Random steps: what the kernel finds is what `walk` finds."""
    rng = random.Random(seed)
    buffers = StepBuffers(LIMITS, 16)
    vocab = rng.choice((2, 3, 50))
    items = random_items(rng, vocab)
    write_rows(buffers, items)
    buffers.choices[:] = [rng.randrange(vocab) for _ in range(len(buffers.choices))]
    for item in items:  # make long paths likely
        if item.tree and rng.random() < 0.7:
            at = rng.randrange(len(item.tree))
            while at >= 0:
                above = item.tree.parents[at]
                buffers.choices[item.out + 1 + above] = item.tree.tokens[at]
                at = above
    buffers.followed[:] = POISON
    machine.launch(follow_lowering(), buffers, np.zeros(0, np.uint8))
    for seq, item in enumerate(items):
        words, first = buffers.followed[seq].tolist(), int(buffers.seq_row[seq])
        rows, tokens = [first], list[int]()
        if item.decodes or item.wants_choice:
            start = item.out + item.outs - 1 - len(item.tree)
            nodes, tokens = walk(item.tree, buffers.choices[start : start + 1 + len(item.tree)].tolist())
            rows += [first + 1 + node for node in nodes]
        assert words[F.NUM_ROWS] == (len(rows) if item.tree else item.rows), (seed, seq)
        assert words[F.NUM_TOKENS] == len(tokens)
        assert (words[F.FIRST_ROW], words[F.DRAFTED]) == (first, int(bool(item.tree)))
        assert words[F.ROWS : F.ROWS + len(rows)] == rows
        assert words[F.TOKENS : F.TOKENS + len(tokens)] == tokens
    assert (buffers.followed[len(items) :] == POISON).all()


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    with tempfile.TemporaryDirectory() as folder:
        for what in sys.argv[1:]:
            name, _, count = what.partition(":")
            machine = TritonMachine(LIMITS, Path(folder))
            for seed in range(int(count or 1)):
                globals()[name](machine, seed)
    print("all as the host has them")


if __name__ == "__main__":
    main()
