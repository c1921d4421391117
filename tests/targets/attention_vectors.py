"""Test vectors for paged attention, the same for every target: step buffers, q, pool bytes, expected output.

A `Sequence` is content only (keys, values, queries, tree). `lay_out` puts sequences into pages and step buffers, each time elsewhere
if asked to, so that one content can be run in any batch, order, slot or page. Everything a kernel must not read is poisoned:
free pages, free slots and other layers hold NaN, unused table entries name a poisoned page, arrays beyond the header's counts hold junk.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.kv_numbers import rotate
from mlsdc.runtime.step import INPUTS, Header, Limits, StepBuffers, aligned
from mlsdc.runtime.tree import Tree, ancestor_words

Array = npt.NDArray[Any]
JUNK = -7  # in step buffers beyond the counts
POISON = 0xFF  # every byte of a free slot: NaN in bf16, f16, f32 and e4m3


@dataclass(frozen=True)
class Sequence:
    """Keys and values by position (`keys[ctx, kv_heads, d]`) and by scratch slot, and the rows to attend with their q[rows, heads, d].

    A row is (slot, position, ancestor word). A prefilled sequence has no slots, its rows have slot -1 and word 0, and its keys include
    those of its rows.
    """

    keys: Array
    values: Array
    slot_keys: Array
    slot_values: Array
    rows: tuple[tuple[int, int, int], ...]
    q: Array

    @property
    def drafted(self) -> bool:
        return self.rows[0][0] >= 0

    def only(self, rows: Seq[int]) -> Sequence:
        """The same sequence when the step holds only these of its rows."""
        return replace(self, rows=tuple(self.rows[r] for r in rows), q=self.q[list(rows)])

    def committed(self, row: int) -> Sequence:
        """A drafted row as it reads once its path is committed: a prefill row whose keys all lie in pages."""
        _, position, word = self.rows[row]
        path = [slot for slot in range(64) if word >> slot & 1]
        return Sequence(
            np.concatenate([self.keys, self.slot_keys[path]]), np.concatenate([self.values, self.slot_values[path]]),
            self.slot_keys[:0], self.slot_values[:0], ((-1, position, 0),), self.q[[row]])


@dataclass(frozen=True)
class Shape:
    """The attention of a model: what a kernel is generated for."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 32
    num_layers: int = 2
    layer: int = 1
    format: str = "bf16"
    window: int = 0
    softcap: float = 0.0
    sinks: int = 0
    coarse: bool = False

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def geometry(self) -> KvGeometry:
        return KvGeometry(self.format, self.page_size, self.num_layers, self.kv_heads, self.head_dim)


LIMITS = Limits(max_model_len=256, max_num_seqs=6, max_num_batched_tokens=48, max_logit_rows=16, max_tree_nodes=24)


@dataclass(frozen=True)
class Case:
    """What a kernel reads, and what it must write. `q[max rows, heads, d]` f32 with junk beyond the rows; `pool` u8[pages, page_bytes].

    `expected[rows, heads, d]` f64 is computed from the pool's bytes.
    """

    shape: Shape
    buffers: StepBuffers
    q: Array
    pool: Array
    expected: Array

    @property
    def num_rows(self) -> int:
        return int(self.buffers.header[Header.ROWS])


def drafted(rng: np.random.Generator, shape: Shape, ctx: int, parents: Seq[int]) -> Sequence:
    """A sequence of `ctx` committed tokens whose last committed token and tree are being verified."""
    tree = Tree(tuple(range(len(parents))), tuple(parents))
    positions = [ctx] + [ctx + depth for depth in tree.depths()]
    rows = tuple(zip(range(len(positions)), positions, ancestor_words(tree), strict=True))
    kv = (ctx + len(rows), shape.kv_heads, shape.head_dim)
    keys, values = _normal(rng, kv), _normal(rng, kv)
    return Sequence(keys[:ctx], values[:ctx], keys[ctx:], values[ctx:], rows, _normal(rng, (len(rows), shape.heads, shape.head_dim)))


def prefilled(rng: np.random.Generator, shape: Shape, start: int, count: int) -> Sequence:
    """A chunk of `count` prompt tokens after `start` earlier ones."""
    kv = (start + count, shape.kv_heads, shape.head_dim)
    keys, values = _normal(rng, kv), _normal(rng, kv)
    rows = tuple((-1, start + i, 0) for i in range(count))
    return Sequence(keys, values, keys[:0], values[:0], rows, _normal(rng, (count, shape.heads, shape.head_dim)))


def random_parents(rng: np.random.Generator, nodes: int) -> list[int]:
    return [int(rng.integers(-1, i)) if i else -1 for i in range(nodes)]


def random_batch(rng: np.random.Generator, shape: Shape, num_seqs: int = 4, limits: Limits = LIMITS) -> list[Sequence]:
    """Drafted sequences (chains, trees, no tree at all) and prefill chunks, mixed, with contexts of 0 to 200 tokens."""
    budget = limits.max_num_batched_tokens
    batch: list[Sequence] = []
    for index in range(num_seqs):
        room = min(budget - (num_seqs - 1 - index), limits.max_tree_nodes)
        ctx = int(rng.choice([0, 1, 63, 64, 65, 127, 128, int(rng.integers(0, 201))]))
        nodes = int(rng.integers(0, room))
        kind = rng.integers(0, 4)
        if kind == 0:
            batch.append(prefilled(rng, shape, ctx, nodes + 1))
        elif kind == 1:
            batch.append(drafted(rng, shape, ctx, range(-1, min(nodes, 8) - 1)))
        else:
            batch.append(drafted(rng, shape, ctx, random_parents(rng, nodes)))
        budget -= len(batch[-1].rows)
    return batch


def lay_out(shape: Shape, sequences: Seq[Sequence], *, pages_seed: int = 0, limits: Limits = LIMITS, spare_pages: int = 5) -> Case:
    """Put the sequences, in this order, into step buffers and randomly chosen pages."""
    geometry = shape.geometry
    size = shape.page_size
    rng = np.random.default_rng(pages_seed)
    wanted = sum(-(-len(s.keys) // size) + -(-len(s.slot_keys) // size) for s in sequences)
    free = rng.permutation(wanted + spare_pages).tolist()
    pool = aligned((wanted + spare_pages, geometry.page_bytes), "u1")
    pool[:] = POISON
    bad_page = free.pop()

    buffers = StepBuffers(limits, size)
    for name, (dtype, _) in INPUTS.items():
        getattr(buffers, name)[:] = JUNK if dtype in ("i4", "i8") else np.uint64(0xDEADBEEFDEADBEEF)
    buffers.page_table[:] = bad_page
    buffers.scratch_table[:] = bad_page
    q = aligned((limits.max_num_batched_tokens, shape.heads, shape.head_dim), "f4")
    q[:] = np.nan

    row = 0
    for index, sequence in enumerate(sequences):
        buffers.seq_ctx[index] = len(sequence.keys) if sequence.drafted else sequence.rows[0][1]
        buffers.seq_row[index] = row
        buffers.seq_rows[index] = len(sequence.rows)
        _store(shape, pool, free, buffers.page_table[index], sequence.keys, sequence.values)
        _store(shape, pool, free, buffers.scratch_table[index], sequence.slot_keys, sequence.slot_values)
        for (slot, position, word), q_row in zip(sequence.rows, sequence.q, strict=True):
            buffers.tokens[row] = 0
            buffers.positions[row] = position
            buffers.row_seq[row] = index
            buffers.row_slot[row] = slot
            buffers.ancestors[row] = np.uint64(word)
            q[row] = q_row
            row += 1
    buffers.header[Header.ROWS] = row
    buffers.header[Header.SEQS] = len(sequences)
    buffers.header[Header.OUT] = 0
    buffers.header[Header.COMMITS] = 0
    buffers.header[Header.WORK] = 0
    return Case(shape, buffers, q, pool, reference(shape, buffers, q, pool))


def reference(shape: Shape, buffers: StepBuffers, q: Array, pool: Array) -> Array:
    """Attention in float64 over the pool's bytes, row by row, straight from the definition of the step buffers: f64[rows, heads, d]."""
    geometry = shape.geometry
    group = shape.heads // shape.kv_heads
    rows = int(buffers.header[Header.ROWS])
    out = np.zeros((rows, shape.heads, shape.head_dim))
    known: dict[tuple[int, int], tuple[Array, Array]] = {}  # (page, kv head) -> its keys and values

    def read(page: int, head: int) -> tuple[Array, Array]:
        if (page, head) not in known:
            known[page, head] = geometry.read(pool[page], shape.layer, head, coarse=shape.coarse)
        return known[page, head]

    for row in range(rows):
        slots = visible_slots(shape, buffers, row)
        for head in range(shape.kv_heads):
            keys = np.stack([read(page, head)[0][slot] for page, slot in slots]).astype(np.float64)
            values = np.stack([read(page, head)[1][slot] for page, slot in slots]).astype(np.float64)
            scores = q[row, head * group : (head + 1) * group].astype(np.float64) @ keys.T * shape.scale
            if shape.softcap:
                scores = shape.softcap * np.tanh(scores / shape.softcap)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[row, head * group : (head + 1) * group] = weights @ values / weights.sum(axis=1, keepdims=True)
    return out


def visible_slots(shape: Shape, buffers: StepBuffers, row: int) -> list[tuple[int, int]]:
    """(page, slot in the page) of every key the row reads, in order of position."""
    seq = int(buffers.row_seq[row])
    position = int(buffers.positions[row])
    size = shape.page_size
    committed = int(buffers.seq_ctx[seq]) if buffers.row_slot[row] >= 0 else position + 1
    path = [slot for slot in range(64) if int(buffers.ancestors[row]) >> slot & 1]
    keys = [(int(buffers.page_table[seq, j // size]), j % size) for j in range(committed)]
    keys += [(int(buffers.scratch_table[seq, slot // size]), slot % size) for slot in path]
    start = max(0, position + 1 - shape.window) if shape.window else 0
    return keys[: min(start, shape.sinks)] + keys[start:]


def _store(shape: Shape, pool: Array, free: list[int], table: Array, keys: Array, values: Array) -> None:
    """Take pages for the tokens and write them into one layer of the pool; other layers stay poisoned."""
    geometry = shape.geometry
    kv = geometry.layer_format(shape.layer)
    turned = [rotate(x) if block.rotated else x for x, block in ((keys, kv.keys), (values, kv.values))]  # all at once: it is slow
    for token, (key, value) in enumerate(zip(*turned, strict=True)):
        entry, slot = divmod(token, shape.page_size)
        if slot == 0:
            table[entry] = free.pop()
        for head in range(shape.kv_heads):
            k_block, v_block = geometry.blocks(pool[table[entry]], shape.layer, head)
            kv.keys.store(k_block, slot, key[head])
            kv.values.store(v_block, slot, value[head])


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape, np.float32)
