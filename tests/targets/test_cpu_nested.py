"""int8n on the CPU: int8 whose nibbles lie in two planes, read whole or by a view of the high one."""

from __future__ import annotations

import numpy as np
import pytest

from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.ops_kv import AppendKv, PagedAttention
from mlsdc.compiler.types import Dim, DType, KvType, TensorType, TreeType
from mlsdc.runtime.kv_numbers import rotate
from mlsdc.runtime.step import Limits
from tests.targets.attention_vectors import POISON, Shape, drafted, lay_out, prefilled, random_batch, random_parents
from tests.targets.cpu_machine import Machine, get

LIMITS = Limits(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64, max_logit_rows=16, max_tree_nodes=30)
ROWS = Dim("rows", 1, LIMITS.max_num_batched_tokens)
SHAPES = {
    "whole": Shape(9, 3, 64, page_size=32, format="int8n"), "view": Shape(9, 3, 64, page_size=32, format="int8n", coarse=True),
    "of 80": Shape(2, 1, 80, page_size=16, format="int8n", window=100),
    "keys": Shape(2, 1, 64, page_size=64, format="int8n/bf16", coarse=True),
}  # fmt: skip
WRITTEN = ("whole", "of 80")


def attention(shape: Shape) -> Graph:
    g = shape.geometry
    b = Builder(f"nested {shape}")
    q = b.input("q", TensorType(DType.F32, (ROWS, shape.heads, shape.head_dim)))
    kv = b.input("kv", KvType(g.format, g.page_size, g.num_layers, g.num_kv_heads, g.head_dim))
    op = PagedAttention(shape.layer, shape.scale, shape.window, shape.softcap, coarse=shape.coarse)
    return b.build(result=b.add("result", op, q, kv, b.input("tree", TreeType())))


def write(shape: Shape) -> Graph:
    g = shape.geometry
    b = Builder(f"nested write {shape}")
    k, v = (b.input(name, TensorType(DType.F32, (ROWS, shape.kv_heads, shape.head_dim))) for name in ("k", "v"))
    kv = b.input("kv", KvType(g.format, g.page_size, g.num_layers, g.num_kv_heads, g.head_dim))
    return b.build(result=b.add("result", AppendKv(shape.layer), kv, k, v, b.input("tree", TreeType())))


GRAPHS = {name: attention(shape) for name, shape in SHAPES.items()}
WRITES = {name: write(SHAPES[name]) for name in WRITTEN}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine.build(tmp_path_factory, "cpu-nested", LIMITS, [*GRAPHS.values(), *WRITES.values()])


@pytest.mark.parametrize("name", SHAPES)
def test_attention_is_float64s_over_the_bytes_it_reads(machine: Machine, name: str) -> None:
    shape = SHAPES[name]
    for seed in range(4):
        rng = np.random.default_rng(seed)
        batch = random_batch(rng, shape, limits=LIMITS) if seed else [drafted(rng, shape, 300, random_parents(rng, 25)),
                                                                      prefilled(rng, shape, 250, 30)]
        case = lay_out(shape, batch, pages_seed=seed, limits=LIMITS)
        memory = machine.run(GRAPHS[name], {"q": case.q}, case.buffers, case.pool.copy())
        found = get(memory["result"], case.num_rows, shape.heads, shape.head_dim)
        assert np.abs(found - case.expected).max() < 2e-4


def test_a_view_differs_from_the_whole_by_less_than_half_a_high_step(machine: Machine) -> None:
    """As the bytes say: the middle of 16 codes stands for all of them."""
    rng = np.random.default_rng(0)
    geometry = SHAPES["whole"].geometry
    page = np.zeros(geometry.page_bytes, np.uint8)
    tokens = rng.standard_normal((2, 32, 64), np.float32)
    for slot in range(32):
        geometry.write(page, 1, 2, slot, *tokens[:, slot])
    blocks = geometry.kv.keys, geometry.kv.values
    for block, *vectors in zip(blocks, tokens, geometry.read(page, 1, 2), geometry.read(page, 1, 2, coarse=True), strict=True):
        x, whole, view = (rotate(each) if block.rotated else each for each in vectors)  # as they are quantised
        scale = np.abs(x).max(axis=1, keepdims=True) / 127
        assert (np.abs(view - whole) <= 8.01 * scale).all()
        assert np.abs(view - whole).max() > 7 * scale.min()


@pytest.mark.parametrize("name", WRITTEN)
def test_written_bytes_are_the_formats(machine: Machine, name: str) -> None:
    shape = SHAPES[name]
    rng = np.random.default_rng(1)
    case = lay_out(shape, [drafted(rng, shape, 37, random_parents(rng, 20)), prefilled(rng, shape, 5, 30)], limits=LIMITS)
    rows = case.num_rows
    k, v = (rng.standard_normal((rows, shape.kv_heads, shape.head_dim), np.float32) for _ in range(2))
    pool, wanted = case.pool.copy(), case.pool.copy()
    pool[:], wanted[:] = POISON, POISON
    machine.run(WRITES[name], {"k": k, "v": v}, case.buffers, pool)
    for row in range(rows):
        slot, seq = int(case.buffers.row_slot[row]), int(case.buffers.row_seq[row])
        table, at = (case.buffers.page_table, int(case.buffers.positions[row])) if slot < 0 else (case.buffers.scratch_table, slot)
        page = wanted[table[seq, at // shape.page_size]]
        for head in range(shape.kv_heads):
            shape.geometry.write(page, shape.layer, head, at % shape.page_size, k[row, head], v[row, head])
    assert np.array_equal(pool, wanted)
