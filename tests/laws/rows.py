"""Steps written by hand, below the scheduler: any rows, in any order, on any pages, and what they give, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.request import Request
from mlsdc.runtime.step import Array, Header
from mlsdc.runtime.tree import Tree, ancestor_words
from tests.function_level import sends_all

POISON = 0xFF  # NaN in bf16


def engine_over(engine: Engine, level: Level | None = None, *, num_pages: int | None = None) -> Engine:
    """Another engine with an empty pool over the same device and weights, its pages poisoned; one of them may be used at a time."""
    memory, all_pages = engine._memory, engine._memory.num_pages
    memory.num_pages = num_pages or all_pages
    try:
        made = sends_all(Engine(engine.manifest, engine.device, memory, [level] if level else [], tokenizer=engine.tokenizer))
    finally:
        memory.num_pages = all_pages
    poison(made, range(engine._memory.num_pages))
    return made


def poison(engine: Engine, pages: Sequence[int]) -> None:
    """Fill pages with NaN bytes."""
    memory = engine._memory
    if pages:
        bad = np.full_like(memory.read_page(pages[0]), POISON)
        for page in pages:
            memory.write_page(page, bad)


@dataclass
class Pages:
    """A sequence's places: pages of its committed positions, and of its scratch slots."""

    pages: list[int]
    scratch: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Item:
    """What one sequence sends in a step: `tokens` from position `start` on as committed rows, or the last token and a `tree` after it."""

    at: Pages
    start: int
    tokens: tuple[int, ...]
    tree: Tree | None = None

    @property
    def num_rows(self) -> int:
        return len(self.tokens) if self.tree is None else 1 + len(self.tree)


class Steps:
    """Runs steps on an engine's device, for one test at a time."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        self.memory = engine._memory
        self.buffers = self.memory.buffers
        self.size = self.buffers.page_size
        self.limits = engine.manifest.limits
        self.vocab = engine.manifest.model.vocab_size
        self._random = np.random.default_rng(seed)
        self.reset()

    def reset(self) -> None:
        """All pages are free, in a new order, and poisoned."""
        self._free = self._random.permutation(self.memory.num_pages).tolist()
        poison(self.engine, range(self.memory.num_pages))

    def pages(self, length: int) -> Pages:
        """Room for `length` positions and a slab, on pages nobody has."""
        count = -(-length // self.size)
        taken = [self._free.pop() for _ in range(count + self.limits.scratch_pages(self.size))]
        return Pages(taken[:count], taken[count:])

    def run(self, items: Sequence[Item], *, logits: bool = True) -> list[Array]:
        """Logits f32[rows, vocab] of every item's rows."""
        b, row = self.buffers, 0
        for seq, item in enumerate(items):
            end = row + item.num_rows
            if item.tree is None:
                b.tokens[row:end], b.positions[row:end] = item.tokens, range(item.start, item.start + len(item.tokens))
                b.row_slot[row:end], b.ancestors[row:end] = -1, 0
            else:
                b.tokens[row:end] = (*item.tokens, *item.tree.tokens)
                b.positions[row:end] = [item.start, *(item.start + depth for depth in item.tree.depths())]
                b.row_slot[row:end], b.ancestors[row:end] = range(end - row), ancestor_words(item.tree)
                b.scratch_table[seq, : len(item.at.scratch)] = item.at.scratch
            b.row_seq[row:end] = seq
            b.seq_ctx[seq], b.seq_row[seq], b.seq_rows[seq] = item.start, row, end - row
            b.page_table[seq, : len(item.at.pages)] = item.at.pages
            row = end
        wanted = row if logits else 0
        b.out_rows[:wanted] = range(wanted)
        b.header[:] = -1
        b.header[Header.ROWS], b.header[Header.SEQS], b.header[Header.OUT], b.header[Header.COMMITS] = row, len(items), wanted, 0
        self.memory.programs["forward"].run()
        found = self.memory.programs["forward"].tap("logits")[:wanted, : self.vocab].copy()
        cuts = np.cumsum([item.num_rows for item in items])[:-1]
        return np.split(found, cuts) if logits else []

    def chunks(self, at: Pages, tokens: Sequence[int], sizes: Sequence[int], start: int = 0) -> Array:
        """Prefill `tokens` alone, in chunks of the given sizes over and over: logits of every row."""
        found, i = [], 0
        while start < len(tokens):
            count = min(sizes[i % len(sizes)], len(tokens) - start, self.limits.max_logit_rows)
            found += self.run([Item(at, start, tuple(tokens[start : start + count]))])
            start, i = start + count, i + 1
        return np.concatenate(found)

    def commit(self, at: Pages, start: int, slots: Sequence[int]) -> None:
        """Copy scratch slots to the positions from `start` on."""
        b, size = self.buffers, self.size
        for i, slot in enumerate(slots):
            b.commit_src[i] = at.scratch[slot // size] * size + slot % size
            b.commit_dst[i] = at.pages[(start + i) // size] * size + (start + i) % size
        b.header[Header.COMMITS] = len(slots)
        self.memory.programs["commit"].run()

    def bytes_of(self, at: Pages, length: int) -> Array:
        return stored(self.engine, at.pages, length)


def stored(engine: Engine, pages: Sequence[int], length: int) -> Array:
    """u8[length, bytes]: keys and values of every layer and head at the first `length` positions, read through a page table."""
    geometry = engine.manifest.target_level.kv
    assert geometry is not None
    size, dim = geometry.page_size, geometry.head_dim
    tokens = np.empty((len(pages) * size, geometry.num_layers, geometry.num_kv_heads, 2, 2 * dim), np.uint8)
    for i, page in enumerate(pages[: -(-length // size)]):
        data = engine._memory.read_page(page)
        part = tokens[i * size : (i + 1) * size]
        for layer in range(geometry.num_layers):
            for head in range(geometry.num_kv_heads):
                k, v = geometry.blocks(data, layer, head)
                part[:, layer, head, 0] = k.reshape(-1, dim // 2, 16, 4).transpose(0, 2, 1, 3).reshape(size, -1)
                part[:, layer, head, 1] = v.reshape(size, -1)
    return tokens[:length].reshape(length, geometry.num_layers * geometry.num_kv_heads * 4 * dim)


def committed(engine: Engine, request: Request) -> Array:
    """The bytes of a running request's committed positions."""
    return stored(engine, request.table.pages, request.num_computed)
