"""The two stateful values of a step in the reference interpreter: the paged KV cache, with real page bytes, and the tree.

No torch here: kernel tests use these as the oracle of page bytes and of what every row reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.errors import IrError
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.step import Header, StepBuffers

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class StepTree:
    """What a `tree` value is: the step's arrays (runtime.step.INPUTS), cut to the rows and sequences in use."""

    positions: Array  # i32[rows]
    row_seq: Array  # i32[rows]
    row_slot: Array  # i32[rows], -1 for a prefill row
    ancestors: Array  # u64[rows]
    seq_ctx: Array  # i32[seqs]
    page_table: Array  # i32[seqs, pages_per_seq]
    scratch_table: Array  # i32[seqs, scratch_pages]

    @staticmethod
    def from_buffers(buffers: StepBuffers) -> StepTree:
        """Copies of the buffers' first `header[ROWS]` rows and `header[SEQS]` sequences."""
        rows, seqs = int(buffers.header[Header.ROWS]), int(buffers.header[Header.SEQS])
        by_row = (buffers.positions, buffers.row_seq, buffers.row_slot, buffers.ancestors)
        by_seq = (buffers.seq_ctx, buffers.page_table, buffers.scratch_table)
        return StepTree(*(a[:rows].copy() for a in by_row), *(a[:seqs].copy() for a in by_seq))

    @staticmethod
    def prefill(num_tokens: int, page_size: int) -> StepTree:
        """One sequence's first `num_tokens` tokens, committed as they enter, in pages 0, 1, ..."""
        pages = np.arange(-(-num_tokens // page_size), dtype=np.int32)[None]
        positions = np.arange(num_tokens, dtype=np.int32)
        zeros = np.zeros(num_tokens, np.int32)
        words = np.zeros(num_tokens, np.uint64)
        return StepTree(positions, zeros, zeros - 1, words, np.zeros(1, np.int32), pages, np.zeros((1, 1), np.int32))

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def ctx(self) -> int:
        """Positions 0 .. ctx - 1 are all that any row sees."""
        return int(self.positions.max()) + 1 if self.num_rows else 1

    def slots(self, row: int) -> list[int]:
        """Scratch slots the row reads, itself included, in order of position; none for a prefill row."""
        word = int(self.ancestors[row])
        return [] if self.row_slot[row] < 0 else [slot for slot in range(64) if word >> slot & 1]

    def committed(self, row: int) -> int:
        """How many positions the row reads from pages."""
        return int(self.positions[row]) + 1 if self.row_slot[row] < 0 else int(self.seq_ctx[self.row_seq[row]])

    def target(self, row: int, page_size: int) -> tuple[int, int]:
        """(page, slot in the page) that the row's own key and value are written to."""
        seq, slot = int(self.row_seq[row]), int(self.row_slot[row])
        table, at = (self.page_table, int(self.positions[row])) if slot < 0 else (self.scratch_table, slot)
        return int(table[seq, at // page_size]), at % page_size


@dataclass(frozen=True, eq=False)
class KvState:
    """What a `kv` value is: the bytes of every page, `pool` u8[pages, page_bytes], laid out by `geometry`.

    `append` gives a new state and leaves the old one as it was, so that SSA holds.
    """

    geometry: KvGeometry
    pool: Array

    def _check(self) -> None:
        """The interpreter has pages only: what a grouped format keeps in 16 bits beside them is the kernels' and their tests' business."""
        if self.geometry.grouped:
            raise IrError(f"kv format '{self.geometry.format}': the reference interpreter has formats of one token at a time only; "
                          "compile with --set target.kv=bf16 to execute passes or compare launches")

    @staticmethod
    def empty(geometry: KvGeometry, num_pages: int, poison: int = 0) -> KvState:
        """`num_pages` pages whose bytes are all `poison`."""
        return KvState(geometry, np.full((num_pages, geometry.page_bytes), poison, np.uint8))

    def append(self, layer: int, tree: StepTree, keys: Array, values: Array) -> KvState:
        """Every row's key and value, f32[rows, kv_heads, head_dim], written where the tree says."""
        self._check()
        pool = self.pool.copy()
        for row in range(tree.num_rows):
            page, slot = tree.target(row, self.geometry.page_size)
            for head in range(self.geometry.num_kv_heads):
                self.geometry.write(pool[page], layer, head, slot, keys[row, head], values[row, head])
        return KvState(self.geometry, pool)

    def read(self, layer: int, tree: StepTree) -> tuple[Array, Array]:
        """Every row's keys and values by position, dequantised: f32[rows, kv_heads, ctx, head_dim]; zeros past the row's position."""
        self._check()
        shape = (tree.num_rows, self.geometry.num_kv_heads, tree.ctx, self.geometry.head_dim)
        keys, values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        pages: dict[tuple[int, int], tuple[Array, Array]] = {}  # (sequence, 0 pages or 1 scratch) -> its tokens

        def tokens(seq: int, scratch: int) -> tuple[Array, Array]:
            if (seq, scratch) not in pages:
                pages[seq, scratch] = self._tokens(layer, (tree.page_table, tree.scratch_table)[scratch][seq])
            return pages[seq, scratch]

        for row in range(tree.num_rows):
            seq, committed, slots = int(tree.row_seq[row]), tree.committed(row), tree.slots(row)
            if committed + len(slots) != tree.positions[row] + 1:
                raise IrError(f"row {row}: reads {committed} + {len(slots)} positions, but its own is {tree.positions[row]}")
            for out, table, scratch in zip((keys, values), tokens(seq, 0), tokens(seq, 1), strict=True):
                out[row, :, :committed] = table[:, :committed]
                out[row, :, committed : committed + len(slots)] = scratch[:, slots]
        return keys, values

    def _tokens(self, layer: int, table: Array) -> tuple[Array, Array]:
        """All tokens of the pages in `table`, in order: f32[kv_heads, tokens, head_dim] twice. Unused pages (out of range) are zeros."""
        size = (self.geometry.num_kv_heads, len(table) * self.geometry.page_size, self.geometry.head_dim)
        keys, values = np.zeros(size, np.float32), np.zeros(size, np.float32)
        for i, page in enumerate(table):
            if not 0 <= page < len(self.pool):
                continue
            part = slice(i * self.geometry.page_size, (i + 1) * self.geometry.page_size)
            for head in range(self.geometry.num_kv_heads):
                keys[head, part], values[head, part] = self.geometry.read(self.pool[page], layer, head)
        return keys, values
