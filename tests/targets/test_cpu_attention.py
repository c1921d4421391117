"""Paged attention, KV writes and commits on the CPU: float64 over the pool's bytes, exact bytes, and law L2."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.ops_kv import AppendKv, PagedAttention
from mlsdc.compiler.ops_quant import AppendKvSlice
from mlsdc.compiler.quantise import quantise_a8
from mlsdc.compiler.types import Dim, DType, KvType, TensorType, TreeType
from mlsdc.runtime.kv_blocks import Block
from mlsdc.runtime.step import Header, Limits, StepBuffers
from tests.targets.attention_vectors import Case, Sequence, Shape, drafted, lay_out, prefilled, random_batch, random_parents
from tests.targets.cpu_machine import Array, Machine, get, get_a8, one_by_one_backwards, poisoned, whole

LIMITS = Limits(max_model_len=1024, max_num_seqs=6, max_num_batched_tokens=72, max_logit_rows=16, max_tree_nodes=63)
ROWS = Dim("rows", 1, LIMITS.max_num_batched_tokens)
SHAPES = {
    "smollm2": Shape(9, 3, 64, page_size=32), "pages of 16": Shape(4, 4, 64, page_size=16), "pages of 64": Shape(2, 1, 64, page_size=64),
    "four a group": Shape(8, 2, 80, page_size=16), "six of one": Shape(6, 1, 96, page_size=32, num_layers=3, layer=0),
    "eight a group": Shape(8, 1, 128, page_size=32), "llama": Shape(8, 2, 128, page_size=16), "wide": Shape(4, 2, 256, page_size=32),
    "wide alone": Shape(2, 2, 256, page_size=64, num_layers=1, layer=0), "narrow": Shape(4, 2, 16, page_size=16),
    "window of 40": Shape(4, 2, 64, page_size=32, window=40), "window of 300": Shape(3, 1, 80, page_size=16, window=300),
    "window of one": Shape(2, 1, 64, page_size=16, window=1), "softcap": Shape(4, 2, 64, page_size=16, softcap=2.0),
    "int8": Shape(9, 3, 64, page_size=32, format="int8"), "int8 of 80": Shape(4, 1, 80, page_size=16, format="int8@0=bf16"),
    "int8 of 256": Shape(2, 1, 256, page_size=64, format="int8"), "fp8": Shape(4, 2, 64, page_size=32, format="fp8", window=40),
    "int8 with a window": Shape(4, 2, 112, page_size=32, format="int8", window=100, softcap=2.0),
    "int8 keys": Shape(6, 2, 64, page_size=16, format="int8/fp8"), "fp8 keys": Shape(3, 1, 96, page_size=64, format="fp8/bf16"),
    "int4 tokens": Shape(3, 1, 64, page_size=32, format="int4-token"), "int4 of 512": Shape(1, 1, 512, page_size=16, format="int4-token"),
    "int4 values": Shape(4, 2, 80, page_size=16, format="int8/int4-token", window=100),
}  # fmt: skip
QUANTISED = ("smollm2", "four a group", "window of 40")
SOME = ("smollm2", "four a group", "wide", "window of 40", "int8", "int8 with a window", "fp8", "int8 keys", "int4 tokens", "int4 values")


def allowed(shape: Shape) -> float:
    """Largest error of a result near 1. Integer dots take q and the probabilities in two planes of int8: 2^-15 of the largest of a row."""
    return 2e-4 * max(1.0, shape.head_dim / 256) if "int" in shape.format else 1e-5


def attention_graph(shape: Shape, *, quantise: bool = False) -> Graph:
    g = shape.geometry
    b = Builder(f"attend {shape} {quantise}")
    q = b.input("q", TensorType(DType.F32, (ROWS, shape.heads, shape.head_dim)))
    kv = b.input("kv", KvType(g.format, g.page_size, g.num_layers, g.num_kv_heads, g.head_dim))
    op = PagedAttention(shape.layer, shape.scale, shape.window, shape.softcap, quantise)
    return b.build(result=b.add("result", op, q, kv, b.input("tree", TreeType())))


def append_graph(shape: Shape, half: int, *, fused: bool) -> Graph:
    """Fused: a projection of [2 query heads | k | v] columns."""
    g, width = shape.geometry, shape.kv_heads * shape.head_dim
    b = Builder(f"append {shape} {half} {fused}")
    kv = b.input("kv", KvType(g.format, g.page_size, g.num_layers, g.num_kv_heads, g.head_dim))
    tree = b.input("tree", TreeType())
    if not fused:
        k, v = (b.input(name, TensorType(DType.F32, (ROWS, shape.kv_heads, shape.head_dim))) for name in ("k", "v"))
        return b.build(result=b.add("result", AppendKv(shape.layer), kv, k, v, tree))
    x = b.input("x", TensorType(DType.F32, (ROWS, 2 * shape.head_dim + 2 * width)))
    table = b.input("table", TensorType(DType.F32, (ROWS, 2, half)))
    op = AppendKvSlice(shape.layer, 2 * shape.head_dim, 2 * shape.head_dim + width)
    return b.build(result=b.add("result", op, kv, x, table, tree))


APPENDS = {
    "smollm2": (SHAPES["smollm2"], 32), "pages of 16": (SHAPES["pages of 16"], 32), "four a group": (SHAPES["four a group"], 40),
    "partial": (Shape(2, 2, 64, page_size=64), 12), "odd partial": (Shape(2, 1, 32, page_size=16), 5),
    "narrow": (SHAPES["narrow"], 8), "wide": (SHAPES["wide"], 128), "int8": (SHAPES["int8"], 32), "int8 of 80": (SHAPES["int8 of 80"], 40),
    "int8 of 256": (SHAPES["int8 of 256"], 128), "fp8": (SHAPES["fp8"], 32), "int8 keys": (SHAPES["int8 keys"], 32),
    "fp8 keys": (SHAPES["fp8 keys"], 48), "int4 tokens": (SHAPES["int4 tokens"], 32), "int4 values": (SHAPES["int4 values"], 40),
    "int4 of 512": (SHAPES["int4 of 512"], 256),
}  # fmt: skip
GRAPHS = {
    **{name: attention_graph(shape) for name, shape in SHAPES.items()},
    **{f"{name} a8": attention_graph(SHAPES[name], quantise=True) for name in QUANTISED},
    **{f"{name} append": append_graph(shape, half, fused=False) for name, (shape, half) in APPENDS.items()},
    **{f"{name} slice": append_graph(shape, half, fused=True) for name, (shape, half) in APPENDS.items()},
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine.build(tmp_path_factory, "cpu-attention", LIMITS, GRAPHS.values())


def attend(machine: Machine, name: str, case: Case, ranges: Any = whole) -> Array:
    """f32[rows, heads, d]"""
    pool = case.pool.copy()
    memory = machine.run(GRAPHS[name], {"q": case.q}, case.buffers, pool, ranges=ranges)
    assert np.array_equal(pool, case.pool), "attention reads the pool"
    return get(memory["result"], case.num_rows, case.shape.heads, case.shape.head_dim)


def lay(shape: Shape, sequences: list[Sequence], seed: int = 0) -> Case:
    return lay_out(shape, sequences, pages_seed=seed, limits=LIMITS)


def rows_of(case: Case, found: Array) -> list[Array]:
    """Results by sequence."""
    seqs = range(int(case.buffers.header[Header.SEQS]))
    return [found[int(case.buffers.seq_row[s]) :][: int(case.buffers.seq_rows[s])] for s in seqs]


# --- numbers ---


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SHAPES)
def test_attention_of_mixed_batches_is_float64s(machine: Machine, name: str, seed: int) -> None:
    shape = SHAPES[name]
    rng = np.random.default_rng(seed)
    case = lay(shape, random_batch(rng, shape, num_seqs=2 + 2 * seed, limits=LIMITS), seed)
    assert np.abs(attend(machine, name, case) - case.expected).max() < allowed(shape)


@pytest.mark.parametrize("ctx", [0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 255, 256, 257, 319, 320, 511, 512, 700, 960])
def test_attention_is_right_around_every_border_of_blocks_and_spans(machine: Machine, ctx: int) -> None:
    for name in ("smollm2", "window of 40", "window of 300", "int8", "int8 with a window", "fp8"):
        shape = SHAPES[name]
        rng = np.random.default_rng(ctx)
        case = lay(shape, [drafted(rng, shape, ctx, random_parents(rng, 40)), prefilled(rng, shape, ctx, 20)], ctx)
        assert np.abs(attend(machine, name, case) - case.expected).max() < allowed(shape)


def test_the_largest_chain_and_star_read_their_own_path(machine: Machine) -> None:
    rng = np.random.default_rng(0)
    for name in ("smollm2", "int8", "fp8"):
        shape = SHAPES[name]
        for parents in (range(-1, 62), [-1] * 63, [-1, *[0] * 62]):
            for ctx in (0, 250):
                case = lay(shape, [drafted(rng, shape, ctx, parents)])
                assert np.abs(attend(machine, name, case) - case.expected).max() < allowed(shape)


def test_a_path_longer_than_the_window_reads_no_slot_of_another_tree(machine: Machine) -> None:
    """The second tree has 21 slots, and its last row, alone in the step, sees one of them: what the first tree's rows left behind in the
    kernel's buffers names slots that the second does not have."""
    shape = SHAPES["window of one"]
    rng = np.random.default_rng(0)
    last = drafted(rng, shape, 40, range(-1, 19)).only([20])
    case = lay(shape, [drafted(rng, shape, 0, range(-1, 45)), last])
    assert np.abs(attend(machine, "window of one", case) - case.expected).max() < allowed(shape)


@pytest.mark.parametrize("name", SOME)
def test_large_scores_stay_finite_and_right(machine: Machine, name: str) -> None:
    shape = SHAPES[name]
    rng = np.random.default_rng(1)
    sequence = drafted(rng, shape, 300, [-1, 0, 0])
    case = lay(shape, [replace(sequence, q=sequence.q * 60)])  # scores in the hundreds: one weight takes nearly all
    assert np.abs(attend(machine, name, case) - case.expected).max() < 20 * allowed(shape)


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_attention_has_the_codes_of_its_float_result(machine: Machine, name: str) -> None:
    shape = SHAPES[name]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        case = lay(shape, random_batch(rng, shape, limits=LIMITS), seed)
        graph = GRAPHS[f"{name} a8"]
        memory = machine.run(graph, {"q": case.q}, case.buffers, case.pool.copy())
        type_ = graph["result"].type
        assert isinstance(type_, TensorType)
        a8, corrections = get_a8(memory["result"], type_, case.num_rows)
        columns = shape.heads * shape.head_dim
        wanted = quantise_a8(attend(machine, name, case).reshape(case.num_rows, -1))
        assert np.allclose(a8.scales[:, : columns // 32], wanted.scales, rtol=3e-7, atol=0)
        assert (np.abs(a8.codes[:, :columns].astype(int) - wanted.codes) <= 1).all()
        assert (a8.codes[:, :columns] == wanted.codes).mean() > 0.999
        assert np.array_equal(corrections, -128 * a8.codes.reshape(case.num_rows, -1, 32).astype(np.int32).sum(-1))
        assert not a8.codes[:, columns:].any()


# --- law L2 ---


@pytest.mark.parametrize("name", SOME)
@given(seed=st.integers(0, 2**32), order=st.permutations(range(4)))
@settings(max_examples=8)
def test_a_sequences_bits_survive_neighbours_order_and_placement(machine: Machine, name: str, seed: int, order: list[int]) -> None:
    shape = SHAPES[name]
    batch = random_batch(np.random.default_rng(seed), shape, limits=LIMITS)
    case = lay(shape, batch, 0)
    together = rows_of(case, attend(machine, name, case))
    moved = lay(shape, [batch[i] for i in order], seed % 97 + 1)
    found = rows_of(moved, attend(machine, name, moved, one_by_one_backwards))
    for at, i in enumerate(order):
        assert np.array_equal(found[at], together[i])
    for i, sequence in enumerate(batch):
        alone = lay(shape, [sequence], 5)
        assert np.array_equal(attend(machine, name, alone), together[i])


@pytest.mark.parametrize("name", SOME)
@given(seed=st.integers(0, 2**32), ctx=st.sampled_from([0, 1, 37, 63, 64, 100, 255, 256, 300, 600]))
@settings(max_examples=8)
def test_a_nodes_bits_are_those_of_its_path_once_committed(machine: Machine, name: str, seed: int, ctx: int) -> None:
    """Tree row = plain decode row: keys in scratch slots or in pages, siblings or none."""
    shape = SHAPES[name]
    rng = np.random.default_rng(seed)
    tree = drafted(rng, shape, ctx, random_parents(rng, 30))
    found = attend(machine, name, lay(shape, [tree], seed % 7))
    rows = rng.choice(31, 6, replace=False)
    plain = lay(shape, [tree.committed(int(row)) for row in rows], seed % 5)
    assert np.array_equal(attend(machine, name, plain), found[rows])


@pytest.mark.parametrize("name", SOME)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 17))
@settings(max_examples=8)
def test_a_rows_bits_do_not_depend_on_the_other_rows_of_its_sequence(machine: Machine, name: str, seed: int, rows: int) -> None:
    shape = SHAPES[name]
    rng = np.random.default_rng(seed)
    chunk = prefilled(rng, shape, int(rng.integers(0, 300)), 40)
    together = attend(machine, name, lay(shape, [chunk]))
    start = int(rng.integers(0, 41 - rows))
    part = lay(shape, [chunk.only(range(start, start + rows))], seed % 3)
    assert np.array_equal(attend(machine, name, part), together[start : start + rows])


# --- bytes of the cache (law L3) ---


def fma(a: Array, b: Array, c: Array) -> Array:
    """f32 fma; a * b is exact in f64, and a sum in f64 is rounded twice once in 2^29 times."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def turned(x: Array, table: Array) -> Array:
    """RoPE as the kernels round it: x[rows, heads, d], table[rows, 2, half]."""
    half = table.shape[2]
    cos, sin = table[:, 0, None], table[:, 1, None]
    low, high = x[..., :half], x[..., half : 2 * half]
    out = x.copy()
    out[..., :half] = fma(low, np.broadcast_to(cos, low.shape), -(high * sin))
    out[..., half : 2 * half] = fma(high, np.broadcast_to(cos, low.shape), low * sin)
    return out


def targets(buffers: StepBuffers, size: int) -> list[tuple[int, int]]:
    """(page, slot) that each row writes to."""
    places = []
    for row in range(int(buffers.header[Header.ROWS])):
        seq, slot, position = int(buffers.row_seq[row]), int(buffers.row_slot[row]), int(buffers.positions[row])
        table, at = (buffers.page_table, position) if slot < 0 else (buffers.scratch_table, slot)
        places.append((int(table[seq, at // size]), at % size))
    return places


def wanted_pool(case: Case, pool: Array, keys: Array, values: Array) -> Array:
    shape, geometry, pool = case.shape, case.shape.geometry, pool.copy()
    for row, (page, slot) in enumerate(targets(case.buffers, shape.page_size)):
        for head in range(shape.kv_heads):
            geometry.write(pool[page], shape.layer, head, slot, keys[row, head], values[row, head])
    return pool


def special(x: Array, rng: np.random.Generator) -> Array:
    """Some ties of rounding, zeros of both signs, subnormals, infinities and the largest numbers among ordinary ones."""
    odd = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x80000000, 0x00000001, 0x7F7FFFFF, 0xFF800000, 0x7F800000, 0x00007FFF], np.uint32)
    where = rng.random(x.shape) < 0.05
    return np.where(where, rng.choice(odd, x.shape).view(np.float32), x).astype(np.float32)


@pytest.mark.parametrize("name", APPENDS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=6)
def test_appended_bytes_are_the_formats_in_pages_and_scratch(machine: Machine, name: str, seed: int) -> None:
    shape, _ = APPENDS[name]
    rng = np.random.default_rng(seed)
    case = lay(shape, random_batch(rng, shape, limits=LIMITS), seed % 11)
    x = rng.standard_normal((2, case.num_rows, shape.kv_heads, shape.head_dim), np.float32)
    kv = shape.geometry.layer_format(shape.layer)
    for part, block in enumerate((kv.keys, kv.values)):
        if not block.rotated:  # a rotation of infinities is no number
            x[part] = special(x[part], rng)
    keys, values = x
    wanted = wanted_pool(case, case.pool, keys, values)
    for ranges in (whole, one_by_one_backwards):
        pool = case.pool.copy()
        machine.run(GRAPHS[f"{name} append"], {"k": keys, "v": values}, case.buffers, pool, ranges=ranges)
        assert np.array_equal(pool, wanted)


@pytest.mark.parametrize("name", APPENDS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=6)
def test_bytes_appended_from_a_projection_are_the_formats_after_rope(machine: Machine, name: str, seed: int) -> None:
    shape, half = APPENDS[name]
    rng = np.random.default_rng(seed)
    case = lay(shape, random_batch(rng, shape, limits=LIMITS), seed % 11)
    width, rows = shape.kv_heads * shape.head_dim, case.num_rows
    x = rng.standard_normal((rows, 2 * shape.head_dim + 2 * width), np.float32)
    angles = rng.uniform(0, 7, (rows, half))
    table = np.stack((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)
    start = 2 * shape.head_dim
    keys = turned(x[:, start : start + width].reshape(rows, shape.kv_heads, -1), table)
    values = x[:, start + width :].reshape(rows, shape.kv_heads, -1)
    wanted = wanted_pool(case, case.pool, keys, values)
    pool = case.pool.copy()
    machine.run(GRAPHS[f"{name} slice"], {"x": x, "table": table}, case.buffers, pool)
    assert np.array_equal(pool, wanted)


@pytest.mark.parametrize("name", APPENDS)
@given(data=st.data())
@settings(max_examples=10)
def test_a_commit_copies_token_slots_of_all_layers_and_nothing_else(machine: Machine, name: str, data: st.DataObject) -> None:
    shape, _ = APPENDS[name]
    geometry, size = shape.geometry, shape.page_size
    pages = 5
    count = data.draw(st.integers(0, 20))
    slots = data.draw(st.permutations(range(pages * size)))[: 2 * count]
    source, target = slots[:count], slots[count:]
    pool = poisoned(pages * geometry.page_bytes).reshape(pages, -1)
    pool[:] = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 256, pool.shape)
    wanted = pool.copy()
    for s, t in zip(source, target, strict=True):
        copy_slot(shape, pool[s // size], s % size, wanted[t // size], t % size)
    buffers = StepBuffers(LIMITS, size)
    buffers.commit_src[:count], buffers.commit_dst[:count] = source, target
    buffers.header[Header.COMMITS] = count
    machine.launch(machine.target.commit(geometry), buffers, pool, one_by_one_backwards)
    assert np.array_equal(pool, wanted)


def copy_slot(shape: Shape, source: Array, s: int, target: Array, t: int) -> None:
    """Move one token's keys and values by their place in the blocks (runtime/kv_blocks.py), without reading them as numbers."""
    geometry = shape.geometry
    for layer in range(shape.num_layers):
        kv = geometry.layer_format(layer)
        for head in range(shape.kv_heads):
            blocks = geometry.blocks(source, layer, head), geometry.blocks(target, layer, head)
            for format_, from_, to in zip((kv.keys, kv.values), *blocks, strict=True):
                to[places(format_, len(to), shape.head_dim, t)] = from_[places(format_, len(to), shape.head_dim, s)]


@cache
def places(format_: Block, size: int, dim: int, slot: int) -> Array:
    """Where a slot's bytes lie in a block of a format: those that change with what is stored there."""
    rng = np.random.default_rng(0)
    first, changed = np.zeros(size, np.uint8), np.zeros(size, bool)
    for _ in range(24):
        block = np.zeros(size, np.uint8)
        format_.store(block, slot, (rng.standard_normal(dim) * 2.0 ** rng.integers(-9, 9)).astype(np.float32))
        changed |= block != first
        first = block
    return np.flatnonzero(changed)
