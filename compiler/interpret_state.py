"""The two stateful values of a step in the reference interpreter: the paged KV cache, with real page bytes, and the tree.

No torch here: kernel tests use these as the oracle of page bytes and of what every row reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.errors import IrError
from mlsdc.runtime.kv_format import KvGeometry, to_bf16
from mlsdc.runtime.kv_numbers import from_bf16, rotate
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


def fill_page(geometry: KvGeometry, page: Array, layer: int, recent: Array) -> None:
    """Write a layer of a page, u8[page_bytes], from its tokens' 16-bit forms, u16[kv_heads, page_size, 2, head_dim]."""
    kv = geometry.layer_format(layer)
    for head in range(geometry.num_kv_heads):
        k_block, v_block = geometry.blocks(page, layer, head)
        kv.keys.write_group(k_block, from_bf16(recent[head, :, 0]))
        kv.values.store_group(v_block, from_bf16(recent[head, :, 1]))


@dataclass(frozen=True, eq=False)
class KvState:
    """What a `kv` value is: the bytes of every page, `pool` u8[pages, page_bytes], laid out by `geometry`.

    In a grouped format `recent` u16[pages, layers, kv heads, page_size, 2, head_dim] are the 16-bit forms of all tokens, keys and values:
    of drafted ones, of a sequence's first, of those whose page is not full, and of those that a row near them reads so (law L3). Values lie
    there as they are quantised, rotated where the format's are. (Kernels keep no more of them than somebody may still read.)

    `append` gives a new state and leaves the old one as it was, so that SSA holds.
    """

    geometry: KvGeometry
    pool: Array
    recent: Array | None = None

    @staticmethod
    def empty(geometry: KvGeometry, num_pages: int, poison: int = 0) -> KvState:
        """`num_pages` pages whose bytes are all `poison`."""
        pool = np.full((num_pages, geometry.page_bytes), poison, np.uint8)
        if not geometry.grouped:
            return KvState(geometry, pool)
        shape = num_pages, geometry.num_layers, geometry.num_kv_heads, geometry.page_size, 2, geometry.head_dim
        return KvState(geometry, pool, np.full(shape, poison * 257, np.uint16))

    def append(self, layer: int, tree: StepTree, keys: Array, values: Array) -> KvState:
        """Every row's key and value, f32[rows, kv_heads, head_dim], written where the tree says."""
        if self.recent is not None:
            return self._append_recent(layer, tree, keys, values)
        pool = self.pool.copy()
        for row in range(tree.num_rows):
            page, slot = tree.target(row, self.geometry.page_size)
            for head in range(self.geometry.num_kv_heads):
                self.geometry.write(pool[page], layer, head, slot, keys[row, head], values[row, head])
        return KvState(self.geometry, pool)

    def _append_recent(self, layer: int, tree: StepTree, keys: Array, values: Array) -> KvState:
        """The same of a grouped format: rows in 16 bits, and the pages whose last token is among the committed ones."""
        assert self.recent is not None
        geometry, pool, recent = self.geometry, self.pool.copy(), self.recent.copy()
        kv = geometry.layer_format(layer)
        turned = rotate(values) if kv.values.rotated else values
        for row in range(tree.num_rows):
            page, slot = tree.target(row, geometry.page_size)
            recent[page, layer, :, slot, 0], recent[page, layer, :, slot, 1] = to_bf16(keys[row]), to_bf16(turned[row])
            if tree.row_slot[row] < 0 and slot == geometry.page_size - 1:
                fill_page(geometry, pool[page], layer, recent[page, layer])
        return replace(self, pool=pool, recent=recent)

    def read(self, layer: int, tree: StepTree, *, coarse: bool = False) -> tuple[Array, Array]:
        """Every row's keys and values by position, dequantised: f32[rows, kv_heads, ctx, head_dim]; zeros past the row's position.

        `coarse`: of a nested format the high plane alone.
        """
        shape = (tree.num_rows, self.geometry.num_kv_heads, tree.ctx, self.geometry.head_dim)
        keys, values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        pages: dict[tuple[int, int], tuple[Array, Array]] = {}  # (sequence, 0 pages or 1 scratch) -> its tokens

        def tokens(seq: int, scratch: int) -> tuple[Array, Array]:
            if (seq, scratch) not in pages:
                pages[seq, scratch] = self._tokens(layer, (tree.page_table, tree.scratch_table)[scratch][seq], coarse)
            return pages[seq, scratch]

        def recent(seq: int, scratch: int) -> tuple[Array, Array]:
            if (seq, 2 + scratch) not in pages:
                pages[seq, 2 + scratch] = self._recent(layer, (tree.page_table, tree.scratch_table)[scratch][seq])
            return pages[seq, 2 + scratch]

        for row in range(tree.num_rows):
            seq, committed, slots = int(tree.row_seq[row]), tree.committed(row), tree.slots(row)
            if committed + len(slots) != tree.positions[row] + 1:
                raise IrError(f"row {row}: reads {committed} + {len(slots)} positions, but its own is {tree.positions[row]}")
            plain = tokens if self.recent is None else recent
            quantised = self._quantised(int(tree.positions[row]), committed)
            sinks = min(self.geometry.tail.sinks, committed) if self.geometry.tail else 0
            for out, old, table, scratch in zip((keys, values), tokens(seq, 0), plain(seq, 0), plain(seq, 1), strict=True):
                out[row, :, :quantised] = old[:, :quantised]
                out[row, :, quantised:committed] = table[:, quantised:committed]
                out[row, :, :sinks] = table[:, :sinks]
                out[row, :, committed : committed + len(slots)] = scratch[:, slots]
        return keys, values

    def _quantised(self, position: int, committed: int) -> int:
        """How many positions a row reads as pages have them: whole groups that end at its own less R, or before (law L3)."""
        tail = self.geometry.tail
        return committed if tail is None else max(0, position - tail.recent) // tail.group * tail.group

    def _recent(self, layer: int, table: Array) -> tuple[Array, Array]:
        """`_tokens` of the 16-bit forms."""
        assert self.recent is not None
        geometry, count = self.geometry, len(self.recent)
        there = ((table >= 0) & (table < count)).astype(np.uint16)
        known = self.recent[np.clip(table, 0, count - 1), layer] * there[:, None, None, None, None]
        found = known.transpose(1, 0, 2, 3, 4).reshape(geometry.num_kv_heads, -1, 2, geometry.head_dim)
        keys, values = from_bf16(found[:, :, 0]), from_bf16(found[:, :, 1])
        return keys, rotate(values) if geometry.layer_format(layer).values.rotated else values

    def _tokens(self, layer: int, table: Array, coarse: bool) -> tuple[Array, Array]:
        """All tokens of the pages in `table`, in order: f32[kv_heads, tokens, head_dim] twice. Unused pages (out of range) are zeros."""
        size = (self.geometry.num_kv_heads, len(table) * self.geometry.page_size, self.geometry.head_dim)
        keys, values = np.zeros(size, np.float32), np.zeros(size, np.float32)
        for i, page in enumerate(table):
            if not 0 <= page < len(self.pool):
                continue
            part = slice(i * self.geometry.page_size, (i + 1) * self.geometry.page_size)
            for head in range(self.geometry.num_kv_heads):
                keys[head, part], values[head, part] = self.geometry.read(self.pool[page], layer, head, coarse=coarse)
        return keys, values
