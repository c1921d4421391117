"""Kernels that work behind a step's choices, through Triton's interpreter, against the host's code:
`python -m tests.targets.interpret_ahead FUNCTION:TIMES`, a function of this file; before it, maybe, the path of a
library with the CPU's functions. Raises AssertionError where they differ.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mlsdc.runtime import ahead_words as W
from mlsdc.runtime import followed as F
from mlsdc.runtime.ahead_words import CLEAR_PARTS
from mlsdc.runtime.device.base import NativeFunction
from mlsdc.runtime.device.cpu import import_tvm_ffi
from mlsdc.runtime.levels.counts import Counts, context_hash
from mlsdc.runtime.levels.coupling import Draw
from mlsdc.runtime.levels.ngram import NgramLevel
from mlsdc.runtime.levels.ngram_native import FIRST_TOKENS, NativeNgramLevel, NativeNgramState, block
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.request import Request, StepItem
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.step import Limits, StepBuffers
from mlsdc.runtime.tree import Tree, walk
from mlsdc.runtime.verify import write_rows
from mlsdc.targets.nvidia_ahead import follow_lowering, ngram_specs
from mlsdc.targets.triton_build import render
from mlsdc.targets.triton_interpreter import launch
from tests.targets.triton_machine import TritonMachine

LIMITS = Limits(max_model_len=256, max_num_seqs=6, max_num_batched_tokens=256, max_logit_rows=256, max_tree_nodes=63)
POISON = 0x7F7F7F7F
NATIVE: Callable[[str], NativeFunction | None] | None = None  # the CPU's functions, if a library was given


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
    machine.launch(follow_lowering(LIMITS), buffers, np.zeros(0, np.uint8))
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


class Blocks:
    """An n-gram level's kernels over `count` blocks of room for `room` tokens, driven word by word; `counts` are its static table."""

    def __init__(self, folder: Path, level: NgramLevel, counts: Counts, room: int, count: int) -> None:
        self.level, self.counts, self.room = level, counts, room
        self.specs = {spec.template: spec for spec in ngram_specs(level.order)}
        self.sources = {}
        for name, spec in self.specs.items():
            self.sources[name] = folder / f"k_{spec.key}.py"
            self.sources[name].write_text(render(spec))
        self.empty = block(room, level.order)
        self.states = np.full((count, len(self.empty)), -1, np.int64)
        self.held = [0] * count
        self.control = np.zeros((count, W.CONTROL), np.int32)
        self.followed = np.full((count, F.TOKENS + 64), POISON, np.int32)
        self.scratch = np.full((count, self.specs["ngram_propose"].params.scratch_words), POISON, np.int32)  # type: ignore[attr-defined]
        self.results = np.full((count, W.RESULT + 3 * level.max_nodes), POISON, np.int32)

    def step(self, fed: list[list[int]], brought: list[list[int]], budget: int, draws: list[Draw | None]) -> list[Tree | None]:
        """Every block observes what it is fed, then what its step brought, and proposes; None: it did not hold what it should."""
        level, feed = self.level, list[int]()
        for seq, (tokens, new) in enumerate(zip(fed, brought, strict=True)):
            self.followed[seq, F.NUM_TOKENS], self.followed[seq, F.TOKENS : F.TOKENS + len(new)] = len(new), new
            row, draw = self.control[seq], draws[seq]
            row[: W.SEED] = seq, self.held[seq], len(feed), len(tokens), bool(new), budget, draw is not None, 0
            row[W.SEED : W.SEED + 2].view(np.uint64)[0] = 0 if draw is None else draw.seed
            feed += tokens
            self.held[seq] += len(tokens) + len(new)
        _, mask, _, _, pairs, journal, history = self.empty[:7].tolist()
        words, counts = self.states.shape[1], self.counts
        self._launch("ngram_clear", self.states, self.control, words, each=CLEAR_PARTS)
        self._launch("ngram_observe", self.states, self.control, np.array([*feed, 0], np.int32), self.followed, words, self.room,
                     mask, pairs, journal, history)
        self._launch(
            "ngram_propose", self.states, self.control, self.followed, np.array(counts.entries).view(np.int32), np.array(counts.kinds),
            np.array(counts.vocab), self.scratch, self.results, words, mask, history, counts.slots,
            counts.order if counts.entries.any() else -1, level.max_nodes, level.width, level.live_weight, level.min_probability)
        return [self._tree(seq) for seq in range(len(self.states))]

    def _launch(self, name: str, *args: object, each: int = 1) -> None:
        launch(self.sources[name], self.specs[name].key, len(self.states) * each, args)  # type: ignore[arg-type]

    def _tree(self, seq: int) -> Tree | None:
        row, nodes = self.results[seq], self.level.max_nodes
        count = int(row[W.COUNT])
        if count < 0:
            return None
        tokens, parents, chances = (row[W.RESULT + i * nodes : W.RESULT + i * nodes + count] for i in range(3))
        return self.level.tree(tokens.tolist(), parents.tolist(), chances.view(np.float32).tolist())


def random_counts(rng: random.Random, vocab: int) -> Counts:
    """A static table of any entries, found or not, in runs of up to dozens of slots, some of them a context's own."""
    slots = rng.choice((40, 200, 1000))
    random_bits = np.random.default_rng(rng.randrange(1 << 30))
    kinds = random_bits.choice(np.array([*range(128), 128], np.uint8), slots)
    kinds[random_bits.random(slots) < rng.choice((0.1, 0.5))] = 0
    kinds[rng.randrange(slots)] = 0
    tags = random_bits.integers(0, 1 << 16, slots, np.uint32)
    entries = tags << 16 | random_bits.integers(0, vocab, slots, np.uint32)
    counts = Counts(entries, kinds, random_bits.permutation(vocab).astype(np.int32), rng.randint(0, 4))
    for _ in range(slots):  # entries that are found: of real contexts, somewhere in their run
        context = [rng.randrange(vocab) for _ in range(rng.randint(0, counts.order))]
        h = context_hash(context)
        slot = ((h >> 32) * slots) >> 32
        while kinds[slot] and rng.random() < 0.7:
            slot = (slot + 1) % slots
        if kinds[slot]:
            entries[slot] = (h & 0xFFFF) << 16 | int(entries[slot]) & 0xFFFF
            if kinds[slot] == 128:
                entries[slot] = (h & 0xFFFF) << 16 | rng.randrange(1, 256) << 8 | rng.randrange(1, 30)
    return counts


def ngram(machine: TritonMachine, seed: int) -> None:
    """Random levels and texts: trees are those of the plain state, and, where the CPU's code is at hand, blocks and chances bit for bit."""
    rng = random.Random(seed)
    vocab = rng.choice((4, 12, 60))
    order = rng.choice((1, 4))
    params = {"order": order, "max_nodes": rng.choice((5, 12, 30)), "width": rng.randint(1, 8),
              "min_probability": rng.choice((0.0, 0.01, 0.2)), "live_weight": rng.choice((1.0, 0.5, 32.0))}
    counts = random_counts(rng, vocab) if rng.random() < 0.5 else Counts.none()
    info = LevelInfo("counts", "ngram", params)
    plain = NgramLevel(info, 0, counts)
    native = None if NATIVE is None else NativeNgramLevel(info, 0, NATIVE, counts)
    blocks = Blocks(machine.folder, plain, counts, FIRST_TOKENS, 2)
    draws = [None if rng.random() < 0.5 else Draw(rng.randrange(1 << 64)) for _ in range(2)]
    states = [(plain.start(), None if native is None else native.start()) for _ in range(2)]
    for pair, draw in zip(states, draws, strict=True):
        for state in pair:
            if state is not None and draw is not None:
                state.couple(draw)
    for _ in range(3):
        fed, brought = ([[rng.randrange(rng.choice((2, vocab))) for _ in range(rng.randint(0, most))] for _ in range(2)]
                        for most in (40, 9))
        budget = rng.choice((params["max_nodes"], 7))
        trees = blocks.step(fed, brought, budget, draws)
        for seq, (tree, (python, compiled)) in enumerate(zip(trees, states, strict=True)):
            assert tree is not None
            python.observe(fed[seq] + brought[seq])
            expected = python.propose(budget)
            assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents), (seed, seq, params)
            np.testing.assert_allclose(tree.logq, expected.logq, rtol=1e-5, atol=1e-6)
            if compiled is not None:
                assert isinstance(compiled, NativeNgramState)
                compiled.observe(fed[seq] + brought[seq])
                assert np.array_equal(blocks.states[seq].view(np.uint64), compiled.words), (seed, seq)
                assert tree == compiled.propose(budget), (seed, seq, params)


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    with tempfile.TemporaryDirectory() as folder:
        for what in sys.argv[1:]:
            if what.startswith("/"):
                global NATIVE
                NATIVE = import_tvm_ffi().load_module(what).get_function
                continue
            name, _, count = what.partition(":")
            machine = TritonMachine(LIMITS, Path(folder))
            for seed in range(int(count or 1)):
                globals()[name](machine, seed)
    print("all as the host has them")


if __name__ == "__main__":
    main()
