"""`mlsdc bench gpu-check`: the kernels behind a step's choices against the host's code: where choices lead, and what counts propose."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from mlsdc.compiler.cli_gpu_sampling import Found
from mlsdc.runtime import followed as F
from mlsdc.runtime.bench.rig import Rig
from mlsdc.runtime.device.cuda import CudaLevel
from mlsdc.runtime.levels.coupling import Draw
from mlsdc.runtime.levels.ngram_ahead import AheadNgramLevel, kernels, on_device
from mlsdc.runtime.levels.ngram_native import NativeNgramLevel
from mlsdc.runtime.request import Request, StepItem
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.step import Limits
from mlsdc.runtime.tree import Tree, walk
from mlsdc.runtime.verify import write_rows

VOCAB = 9  # different tokens of the texts: few, so that contexts come again
DRAWS = (None, Draw(1 << 63 | 7))
CHUNKS = (40, 3, 1)  # tokens that a state is given at a time


def ahead_lines(rig: Rig) -> Iterator[Found]:
    """Last of all: the step's buffers are not what they were."""
    if "follow" in rig.memory.programs:
        yield follow_line(rig)
        yield from counts_lines(rig)


def follow_line(rig: Rig) -> Found:
    """A step of full trees, most choices along one of a tree's paths: the share of sequences that are followed elsewhere."""
    level, rng = rig.memory, random.Random(3)
    assert isinstance(level, CudaLevel)
    buffers, program = level.buffers, level.programs["follow"]
    items = full_trees(rig.limits, rng)
    write_rows(buffers, items)
    buffers.choices[:] = [rng.randrange(VOCAB) for _ in range(len(buffers.choices))]
    for item in items:
        at = len(item.tree) - 1
        while at >= 0:
            buffers.choices[item.out + 1 + item.tree.parents[at]] = item.tree.tokens[at]
            at = item.tree.parents[at]
    for name in ("header", "tokens", "row_slot", "ancestors", "seq_row", "seq_rows", "seq_out", "choices"):
        level.bring(name)
    program.run()
    words = level.device.download(level.inputs + level.places["followed"], buffers.followed.nbytes).view(np.int32)
    wrong = 0
    every: Any = words.reshape(buffers.followed.shape)[: len(items)].tolist()
    for item, found in zip(items, every, strict=True):
        _, tokens = walk(item.tree, buffers.choices[item.out : item.out + item.outs].tolist())
        wrong += found[F.TOKENS : F.TOKENS + found[F.NUM_TOKENS]] != tokens
    return "follow", "followed", wrong / len(items), 0.0


def full_trees(limits: Limits, rng: random.Random) -> list[StepItem]:
    """As many sequences as have rows and choices, each with a tree of the most nodes."""
    rows = min(limits.max_num_batched_tokens, limits.max_logit_rows)
    nodes = min(limits.max_tree_nodes, rows - 1)
    items = []
    for _ in range(min(limits.max_num_seqs, rows // (nodes + 1))):
        request = Request([1, 2, 3], SamplingParams(), max_length=64, stop_ids=frozenset(), budget=nodes)
        request.num_computed = 2
        items.append(item := StepItem(request, 1, decodes=True))
        item.tree = Tree(tuple(rng.randrange(VOCAB) for _ in range(nodes)), tuple(rng.randrange(-1, i) for i in range(nodes)))
    return items


def counts_lines(rig: Rig) -> Iterator[Found]:
    """Texts of few tokens, greedy and drawn, through every n-gram level: the share of proposals that are not the host's."""
    for i, info in enumerate(rig.manifest.levels):
        if info.kind != "ngram":
            continue
        plain = NativeNgramLevel.load(info, i, lambda name: None, rig.artifact)
        level = on_device(plain, info, rig.device, rig.memory)
        if not isinstance(level, AheadNgramLevel):
            continue
        rng, different, count = random.Random(4), 0, 0
        for draw in DRAWS:
            pair = level.start(), plain.start()
            if draw is not None:
                for state in pair:
                    state.couple(draw)
            for size in CHUNKS:
                tokens = [rng.randrange(VOCAB) for _ in range(size)]
                for state in pair:
                    state.observe(tokens)
                found, expected = (state.propose(level.max_nodes) for state in pair)
                different += (found.tokens, found.parents) != (expected.tokens, expected.parents)
                count += 1
        yield from ((kernel, info.name, different / count, 0.0) for kernel in kernels(level.order))
