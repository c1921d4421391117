"""Grouped cache formats on the CPU (law L3): however a sequence grows, its pages and what its rows read are the same bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.ops_kv import AppendKv, PagedAttention
from mlsdc.compiler.types import Dim, DType, KvType, TensorType, TreeType
from mlsdc.runtime.kv_format import from_bf16, to_bf16
from mlsdc.runtime.kv_numbers import rotate
from mlsdc.runtime.kv_tail import Tail
from mlsdc.runtime.step import Header, Limits, StepBuffers, aligned
from mlsdc.runtime.tree import Tree, ancestor_words
from tests.targets.attention_vectors import POISON, Shape
from tests.targets.cpu_machine import Array, Machine, get, one_by_one_backwards, whole

LIMITS = Limits(max_model_len=320, max_num_seqs=2, max_num_batched_tokens=104, max_logit_rows=16, max_tree_nodes=20)
ROWS = Dim("rows", 1, LIMITS.max_num_batched_tokens)
SHAPES = {
    "int4": Shape(3, 1, 64, page_size=32, format="int4"),
    "int2": Shape(4, 2, 80, page_size=16, num_layers=1, layer=0, format="int2", window=50),
    "int3": Shape(3, 1, 64, page_size=32, format="int3"),
    "int3 of 112": Shape(2, 1, 112, page_size=16, num_layers=1, layer=0, format="int3", window=100),
    "mixed": Shape(2, 1, 96, page_size=64, format="int8/int4@0=bf16", softcap=2.0),
    "sinks": Shape(2, 1, 64, page_size=16, format="int4", window=70, sinks=5),
    "skipped": Shape(2, 1, 96, page_size=64, layer=0, format="int8/int4@0=bf16"),
    "pages of 64": Shape(3, 1, 64, page_size=64, num_layers=1, layer=0, format="int4"),
    "sinks of 20": Shape(2, 1, 64, page_size=32, num_layers=1, layer=0, format="int4", window=70, sinks=20),
}
MOST = 250  # positions of a test's sequence


def graph_of(shape: Shape) -> Graph:
    """A layer's cache write and attention."""
    g = shape.geometry
    b = Builder(f"grouped {shape}")
    q = b.input("q", TensorType(DType.F32, (ROWS, shape.heads, shape.head_dim)))
    k, v = (b.input(name, TensorType(DType.F32, (ROWS, shape.kv_heads, shape.head_dim))) for name in ("k", "v"))
    kv = b.input("kv", KvType(g.format, g.page_size, g.num_layers, g.num_kv_heads, g.head_dim))
    tree = b.input("tree", TreeType())
    written = b.add("written", AppendKv(shape.layer), kv, k, v, tree)
    op = PagedAttention(shape.layer, shape.scale, shape.window, shape.softcap, sinks=shape.sinks)
    return b.build(result=b.add("result", op, q, written, tree))


GRAPHS = {name: graph_of(shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine.build(tmp_path_factory, "cpu-grouped", LIMITS, GRAPHS.values())


@dataclass
class Sequence:
    """What a sequence's tokens are, by position, where they lie, and what its rows gave."""

    q: Array  # f32[positions, heads, d]
    k: Array  # f32[positions, kv_heads, d]
    v: Array
    pages: list[int] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    length: int = 0
    results: dict[int, Array] = field(default_factory=dict)


class Life:
    """Sequences on one pool: narrow pages first, wide ones behind them; all bytes are poisoned first."""

    def __init__(self, machine: Machine, name: str, contents: list[Sequence]) -> None:
        self.machine, self.name, self.shape = machine, name, SHAPES[name]
        self.geometry = self.shape.geometry
        tail, wide = self.geometry.tail, self.geometry.wide
        assert tail is not None and wide is not None
        self.tail: Tail = tail
        self.sequences = contents
        narrow = len(contents) * -(-MOST // tail.group)
        first_wide = -(-narrow * self.geometry.page_bytes // wide.page_bytes)
        each = tail.num_pages + LIMITS.scratch_pages(tail.page_size)
        self.pool = aligned(((first_wide + len(contents) * each) * wide.page_bytes,), "u1")
        self.pool[:] = POISON
        for i, sequence in enumerate(contents):
            sequence.pages = list(range(i, narrow, len(contents)))
            wides = [first_wide + i + len(contents) * n for n in range(each)]
            sequence.tail, sequence.scratch = wides[: tail.num_pages], wides[tail.num_pages :]

    def page(self, index: int) -> Array:
        size = self.geometry.page_bytes
        return self.pool[index * size : (index + 1) * size]

    def step(self, moves: list[tuple[int, Tree | None, list[int], int]], ranges: object = whole) -> None:
        """Each of `moves`: (sequence, tree or None, accepted nodes, rows of a chunk). Nodes off the path hold other tokens' keys."""
        buffers = StepBuffers(LIMITS, self.tail.group, tail=self.tail)
        rows: list[tuple[Array, Array, Array]] = []
        where: list[tuple[Sequence, int, int]] = []  # (sequence, row, position) of what is committed
        copies: list[tuple[int, int]] = []
        groups: list[tuple[int, int, int]] = []
        for at, (i, tree, accepted, count) in enumerate(moves):
            sequence, start = self.sequences[i], len(rows)
            ctx = sequence.length
            depths = [0, *tree.depths()] if tree else range(count)
            path = [0, *(node + 1 for node in accepted)] if tree else list(range(count))
            for row, depth in enumerate(depths):
                q, k, v = (x[ctx + depth] for x in (sequence.q, sequence.k, sequence.v))
                rows.append((q, k, v) if row in path else (-q, 3 - k, v * 2 + 1))
            number = len(depths)
            part = slice(start, start + number)
            buffers.positions[part] = [ctx + depth for depth in depths]
            buffers.row_seq[part] = at
            buffers.row_slot[part] = range(number) if tree else -1
            buffers.ancestors[part] = ancestor_words(tree) if tree else 0
            buffers.seq_ctx[at], buffers.seq_row[at], buffers.seq_rows[at] = ctx, start, number
            buffers.page_table[at, : len(sequence.pages)] = sequence.pages
            buffers.scratch_table[at, : len(sequence.scratch)] = sequence.scratch
            buffers.tail_table[at, : len(sequence.tail)] = sequence.tail
            where += [(sequence, start + row, ctx + i) for i, row in enumerate(path)]
            for i, slot in enumerate(path if tree else ()):
                position, size = ctx + i, self.tail.page_size
                place, to = self.tail.place(position)
                copies.append((sequence.scratch[slot // size] * size + slot % size, sequence.tail[place] * size + to))
                if (position + 1) % self.tail.group == 0:
                    groups.append((sequence.pages[position // self.tail.group], at, position + 1 - self.tail.group))
            sequence.length += len(path)
        buffers.header[Header.ROWS], buffers.header[Header.SEQS] = len(rows), len(moves)
        q, k, v = (np.stack(x) for x in zip(*rows, strict=True))
        memory = self.machine.run(GRAPHS[self.name], {"q": q, "k": k, "v": v}, buffers, self.pool, ranges=ranges)  # type: ignore[arg-type]
        found = get(memory["result"], len(rows), self.shape.heads, self.shape.head_dim)
        for sequence, row, position in where:
            sequence.results[position] = found[row]
        for n, (source, target) in enumerate(copies):
            buffers.commit_src[n], buffers.commit_dst[n] = source, target
        for n, group in enumerate(groups):
            buffers.group_page[n], buffers.group_seq[n], buffers.group_first[n] = group
        buffers.header[Header.COMMITS], buffers.header[Header.GROUPS] = len(copies), len(groups)
        self.machine.launch(self.machine.target.commit(self.geometry), buffers, self.pool, ranges=ranges)  # type: ignore[arg-type]


def content(seed: int, shape: Shape) -> Sequence:
    rng = np.random.default_rng(seed)
    sizes = ((MOST, heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    return Sequence(*(rng.standard_normal(size, np.float32) for size in sizes))


def stored(shape: Shape, sequence: Sequence) -> tuple[Array, Array]:
    """Keys as they are and values as they lie in 16 bits: f32[positions, kv_heads, d]."""
    turned = shape.geometry.layer_format(shape.layer).values.rotated
    return from_bf16(to_bf16(sequence.k)), from_bf16(to_bf16(rotate(sequence.v) if turned else sequence.v))


def wanted_page(shape: Shape, sequence: Sequence, page: int, head: int) -> tuple[Array, Array]:
    """Bytes of the K and V block of a full page."""
    geometry, kv = shape.geometry, shape.geometry.layer_format(shape.layer)
    k, v = (x[page * shape.page_size : (page + 1) * shape.page_size, head] for x in stored(shape, sequence))
    blocks = geometry.blocks(np.zeros(geometry.page_bytes, np.uint8), shape.layer, head)
    kv.keys.write_group(blocks[0], k)
    kv.values.store_group(blocks[1], v)
    return blocks


def expected(shape: Shape, sequence: Sequence, positions: list[int]) -> dict[int, Array]:
    """Law L3's definition in f64: groups that end at p - R or before as quantised, the rest in 16 bits, and so the first tokens."""
    tail, kv = shape.geometry.tail, shape.geometry.layer_format(shape.layer)
    assert tail is not None
    k, v = stored(shape, sequence)
    v = rotate(v) if kv.values.rotated else v
    out = {position: np.zeros((shape.heads, shape.head_dim)) for position in positions}
    each = shape.heads // shape.kv_heads
    for head in range(shape.kv_heads):
        pages = [wanted_page(shape, sequence, page, head) for page in range(sequence.length // tail.group)]
        quantised = [kv.read(*page, shape.head_dim) for page in pages]
        for p in positions:
            groups = max(0, p - tail.recent) // tail.group
            end = groups * tail.group
            keys = np.concatenate([*(page[0] for page in quantised[:groups]), k[end : p + 1, head]]).astype(float)
            values = np.concatenate([*(page[1] for page in quantised[:groups]), v[end : p + 1, head]]).astype(float)
            first = min(tail.sinks, p + 1)
            keys[:first], values[:first] = k[:first, head], v[:first, head]
            start = max(0, p + 1 - shape.window) if shape.window else 0
            seen = [*range(min(start, shape.sinks)), *range(start, p + 1)]
            scores = sequence.q[p, head * each : (head + 1) * each].astype(float) @ keys[seen].T * shape.scale
            scores = shape.softcap * np.tanh(scores / shape.softcap) if shape.softcap else scores
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[p][head * each : (head + 1) * each] = weights @ values[seen] / weights.sum(axis=1, keepdims=True)
    return out


def grow(life: Life, index: int, rng: np.random.Generator, until: int, chunk: int) -> tuple[int, Tree | None, list[int], int]:
    """A random move: a chunk, or a tree of which a random path is accepted."""
    room = until - life.sequences[index].length
    kind = rng.integers(0, 3)
    if kind == 0 or room == 1:
        return index, None, [], int(rng.integers(1, min(room, chunk) + 1))
    nodes = int(rng.integers(1, min(LIMITS.max_tree_nodes, room - 1) + 1))
    parents = [i - 1 if kind == 1 else int(rng.integers(-1, i)) if i else -1 for i in range(nodes)]
    tree = Tree(tuple(range(nodes)), tuple(parents))
    accepted: list[int] = []
    while rng.random() < 0.8:
        children = [node for node, parent in enumerate(parents) if parent == (accepted[-1] if accepted else -1)]
        if not children:
            break
        accepted.append(int(rng.choice(children)))
    return index, tree, accepted, 0


@pytest.mark.parametrize("name", SHAPES)
@given(seed=st.integers(0, 2**32), until=st.integers(60, 240))
@settings(max_examples=4)
def test_pages_and_rows_do_not_depend_on_how_a_sequence_grew(machine: Machine, name: str, seed: int, until: int) -> None:
    shape = SHAPES[name]
    tail = shape.geometry.tail
    assert tail is not None
    plain = Life(machine, name, [content(seed, shape)])
    while plain.sequences[0].length < until:  # prompt chunks, never a draft
        plain.step([(0, None, [], min(LIMITS.max_num_batched_tokens, until - plain.sequences[0].length))])
    rng = np.random.default_rng(seed)
    life = Life(machine, name, [content(seed, shape), content(seed + 1, shape)])
    while any(sequence.length < until for sequence in life.sequences):
        open_ = [i for i in rng.permutation(2) if life.sequences[i].length < until]
        life.step([grow(life, int(i), rng, until, 40) for i in open_], one_by_one_backwards if rng.random() < 0.3 else whole)
    same, alone = life.sequences[0], plain.sequences[0]
    assert all(np.array_equal(same.results[p], alone.results[p]) for p in range(until))
    for sequence, of in ((same, life), (life.sequences[1], life), (alone, plain)):
        for page in range(until // tail.group):
            for head in range(shape.kv_heads):
                found = shape.geometry.blocks(of.page(sequence.pages[page]), shape.layer, head)
                for block, wanted in zip(found, wanted_page(shape, sequence, page, head), strict=True):
                    assert np.array_equal(block, wanted)
    some = sorted({*range(0, until, 23), until - 1})
    wanted_rows = expected(shape, alone, some)
    assert max(np.abs(alone.results[p] - wanted_rows[p]).max() for p in some) < 5e-4


def test_other_layers_of_a_page_stay_as_they_are(machine: Machine) -> None:
    shape = SHAPES["int4"]
    life = Life(machine, "int4", [content(0, shape)])
    life.step([(0, None, [], 70)])
    assert shape.layer == 1
    start = shape.geometry.k_offset(1, 0)
    assert (life.page(0)[:start] == POISON).all()
    other = replace(shape, layer=0)
    assert other.geometry.k_offset(0, 0) == 0
