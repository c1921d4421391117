"""The native sampling kernels over hand-made logits and step buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from mlsdc.runtime.program import ArenaArg, InputArg, IntArg, Tap
from mlsdc.runtime.step import Array, Header, Limits, StepBuffers, aligned
from mlsdc.targets.cpu_sample import sample_lowering

LIMITS = Limits(max_model_len=200, max_num_seqs=8, max_num_batched_tokens=64, max_logit_rows=24, max_tree_nodes=15)
Ranges = Callable[[int], Iterable[tuple[int, int]]]


class NativeSampler:
    """Kernels for logits[rows, columns] of `vocab` real ids; `functions` finds a kernel by its key."""

    def __init__(self, columns: int, vocab: int, limits: Limits = LIMITS) -> None:
        self.columns, self.vocab, self.limits = columns, vocab, limits
        rows = -(-limits.max_logit_rows // 8) * 8
        self.tap = Tap(0, "f4", (limits.max_logit_rows, columns))
        self.lowering, arena_bytes = sample_lowering(self.tap, vocab, limits, rows * columns * 4)
        self.specs = [call.spec for call in self.lowering.calls]
        self.arena = aligned((arena_bytes,), "u1")
        self.arena[:] = 0xFF  # NaN: what is read before it is written shows

    def run(self, functions: Callable[[str], Any], buffers: StepBuffers, logits: Array, *, backwards: bool = False) -> None:
        """Fill `choices`, `logprob_ids` and `logprobs` of the buffers; one call a task, in reverse order, if `backwards`."""
        tap = self.arena[: self.limits.max_logit_rows * self.columns * 4].view("f4").reshape(-1, self.columns)
        tap[: len(logits)] = logits
        outs = int(buffers.header[Header.OUT])
        for call in self.lowering.calls:
            arguments = [self._argument(arg, buffers) for arg in call.args]
            grid = call.grid * outs
            ranges = [(i, i + 1) for i in reversed(range(grid))] if backwards else [(0, grid)]
            for lo, hi in ranges:
                functions(call.spec.key)(lo, hi, *arguments)

    def _argument(self, arg: object, buffers: StepBuffers) -> Any:
        if isinstance(arg, ArenaArg):
            return ctypes.c_void_p(self.arena.ctypes.data + arg.arena)
        if isinstance(arg, InputArg):
            return ctypes.c_void_p(getattr(buffers, arg.input).ctypes.data)
        assert isinstance(arg, IntArg)
        return arg.int
