"""The native sampling kernels over hand-made logits and step buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlsdc.runtime.program import ArenaArg, InputArg, IntArg, Tap
from mlsdc.runtime.sampling.record import NO_LOGPROBS, OF_CHOICE, Sampler
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.step import Array, Header, Limits, StepBuffers, aligned, mask_words
from mlsdc.targets.cpu_sample import sample_lowering

LIMITS = Limits(max_model_len=200, max_num_seqs=24, max_num_batched_tokens=64, max_logit_rows=24, max_tree_nodes=15)
STOPS = frozenset({3, 7})


class NativeSampler:
    """Kernels for logits[rows, columns] of `vocab` real ids."""

    functions: Mapping[str, Any]

    def __init__(self, columns: int, vocab: int, limits: Limits = LIMITS) -> None:
        self.columns, self.vocab, self.limits = columns, vocab, limits
        rows = -(-limits.max_logit_rows // 8) * 8
        self.lowering, arena_bytes = sample_lowering(Tap(0, "f4", (limits.max_logit_rows, columns)), vocab, limits, rows * columns * 4)
        self.specs = [call.spec for call in self.lowering.calls]
        self.arena = aligned((arena_bytes,), "u1")
        self.arena[:] = 0xFF  # NaN: what is read before it is written shows
        self.logits = self.arena[: limits.max_logit_rows * columns * 4].view("f4").reshape(-1, columns)

    def run(self, buffers: StepBuffers, logits: Array, *, backwards: bool = False) -> Array:
        """The rows' choices; one call a task, in reverse order, if `backwards`. Padding ids get +inf."""
        outs = int(buffers.header[Header.OUT])
        self.logits[:] = np.inf
        self.logits[:outs, : self.vocab] = logits
        buffers.choices[:outs] = logits.argmax(-1)
        for call in self.lowering.calls:
            arguments = [self._argument(arg, buffers) for arg in call.args]
            grid = call.grid * outs
            for lo, hi in [(i, i + 1) for i in reversed(range(grid))] if backwards else [(0, grid)]:
                self.functions[call.spec.key](lo, hi, *arguments)
        return buffers.choices[:outs].copy()

    def _argument(self, arg: object, buffers: StepBuffers) -> Any:
        if isinstance(arg, ArenaArg):
            return ctypes.c_void_p(self.arena.ctypes.data + arg.arena)
        if isinstance(arg, InputArg):
            return ctypes.c_void_p(getattr(buffers, arg.input).ctypes.data)
        assert isinstance(arg, IntArg)
        return arg.int


def step(params: Sequence[SamplingParams], seeds: Sequence[int], tokens: Sequence[Sequence[int]], num_prompt: int = 3, vocab: int = 0
         ) -> StepBuffers:
    """Buffers of a step in which each sequence of committed `tokens` chooses its next one; with grammar masks for `vocab` ids."""
    buffers = StepBuffers(LIMITS, 16, {"masks": mask_words(vocab)})
    count = len(params)
    buffers.header[Header.ROWS] = buffers.header[Header.SEQS] = buffers.header[Header.OUT] = count
    for array in (buffers.out_rows, buffers.row_seq, buffers.seq_row):
        array[:count] = range(count)
    buffers.positions[:count] = [len(known) - 1 for known in tokens]
    buffers.row_slot[:count] = -1
    for seq, (own, seed, known) in enumerate(zip(params, seeds, tokens, strict=True)):
        Sampler(own, seed, num_prompt, STOPS).write(buffers, seq, known)
        buffers.given[seq] = NO_LOGPROBS if own.logprobs is None else OF_CHOICE
    return buffers


def tree_step(params: SamplingParams, seed: int, committed: Sequence[int], drafted: Sequence[int], parents: Sequence[int], num_prompt: int
              ) -> StepBuffers:
    """Buffers of a verify step of one sequence: its last committed token and a tree of drafted ones."""
    from mlsdc.runtime.tree import Tree, ancestor_words

    tree = Tree(tuple(drafted), tuple(parents))
    buffers = step([params], [seed], [committed], num_prompt)
    rows = 1 + len(tree)
    buffers.header[Header.ROWS] = buffers.header[Header.OUT] = rows
    buffers.out_rows[:rows] = buffers.row_slot[:rows] = range(rows)
    buffers.row_seq[:rows] = 0
    buffers.tokens[:rows] = [committed[-1], *drafted]
    buffers.positions[:rows] = [len(committed) - 1 + depth for depth in (0, *tree.depths())]
    buffers.ancestors[:rows] = ancestor_words(tree)
    buffers.given[:rows] = NO_LOGPROBS
    return buffers
