"""32k positions through the CPU's kernels, heads as SmolLM2 has them: a needle's error does not grow with the context."""

from __future__ import annotations

import numpy as np
import pytest

from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.ops_kv import AppendKv, PagedAttention
from mlsdc.compiler.types import Dim, DType, KvType, TensorType, TreeType
from mlsdc.runtime.kv_format import KvGeometry, from_bf16, to_bf16
from mlsdc.runtime.kv_numbers import rotate
from mlsdc.runtime.step import Header, Limits, StepBuffers, aligned
from tests.targets.cpu_machine import Array, Machine, get

HEADS, KV_HEADS, DIM = 9, 3, 64
SHORT, LONG = 1024, 32768
LIMITS = Limits(max_model_len=LONG + 64, max_num_seqs=1, max_num_batched_tokens=8, max_logit_rows=1, max_tree_nodes=0)
ROWS = Dim("rows", 1, LIMITS.max_num_batched_tokens)
SCORE = 16.0  # the needle's; those of the others are about 1 in size
MOST = {"int8": 0.012, "fp8": 0.04, "int4": 0.1}


def graph_of(format: str) -> Graph:
    b = Builder(f"long {format}")
    q = b.input("q", TensorType(DType.F32, (ROWS, HEADS, DIM)))
    k, v = (b.input(name, TensorType(DType.F32, (ROWS, KV_HEADS, DIM))) for name in ("k", "v"))
    kv, tree = b.input("kv", KvType(format, 32, 1, KV_HEADS, DIM)), b.input("tree", TreeType())
    written = b.add("written", AppendKv(0), kv, k, v, tree)
    return b.build(result=b.add("result", PagedAttention(0, DIM**-0.5), q, written, tree))


GRAPHS = {format: graph_of(format) for format in MOST}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine.build(tmp_path_factory, "cpu-long", LIMITS, GRAPHS.values())


def laid_out(format: str, keys: Array, values: Array) -> tuple[StepBuffers, Array]:
    """A step of one row after keys and values f32[context, kv_heads, d], which lie where a run would have put them."""
    geometry, context = KvGeometry(format, 32, 1, KV_HEADS, DIM), len(keys)
    buffers = StepBuffers(LIMITS, 32, tail=geometry.tail)
    pages = context // 32 + 1
    tail, wide = geometry.tail, geometry.wide
    first = 0 if wide is None else -(-pages * geometry.page_bytes // wide.page_bytes)
    pool = aligned((pages * geometry.page_bytes if tail is None or wide is None else (first + tail.num_pages) * wide.page_bytes,), "u1")
    kv = geometry.kv
    turned = (rotate(keys) if kv.keys.rotated else keys), (rotate(values) if kv.values.rotated else values)
    for page in range(context // 32):
        part = slice(page * 32, page * 32 + 32)
        at = pool[page * geometry.page_bytes :][: geometry.page_bytes]
        for head in range(KV_HEADS):
            for block, store, x in zip(geometry.blocks(at, 0, head), (kv.keys, kv.values), turned, strict=True):
                store.store_group(block, from_bf16(to_bf16(x[part, head])) if geometry.grouped else x[part, head])
    if tail is not None and wide is not None:
        for position in (*range(tail.sinks), *range(context - tail.slots, context)):
            place, slot = tail.place(position)
            at = pool[(first + place) * wide.page_bytes :][: wide.page_bytes]
            for head in range(KV_HEADS):
                wide.write(at, 0, head, slot, keys[position, head], turned[1][position, head])
        buffers.tail_table[0, : tail.num_pages] = range(first, first + tail.num_pages)
    buffers.page_table[0, :pages] = range(pages)
    buffers.positions[0], buffers.row_seq[0], buffers.row_slot[0], buffers.ancestors[0] = context, 0, -1, 0
    buffers.seq_ctx[0], buffers.seq_row[0], buffers.seq_rows[0] = context, 0, 1
    buffers.header[Header.ROWS] = buffers.header[Header.SEQS] = 1
    return buffers, pool


def lost(machine: Machine, format: str, context: int) -> float:
    """Error of what a row attends to, over all heads, relative to f64 without a cache; a needle for each kv head is in the middle third."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, HEADS, DIM), np.float32)
    keys, values = (rng.standard_normal((context + 1, KV_HEADS, DIM), np.float32) for _ in range(2))
    each = HEADS // KV_HEADS
    for head in range(KV_HEADS):
        one = q[0, head * each]
        q[0, head * each : (head + 1) * each] = one
        keys[context // 3 + 7 * head, head] = one * SCORE / (one @ one) * DIM**0.5
    buffers, pool = laid_out(format, keys[:-1], values[:-1])
    found = get(machine.run(GRAPHS[format], {"q": q, "k": keys[-1:], "v": values[-1:]}, buffers, pool)["result"], 1, HEADS, DIM)[0]
    exact = np.zeros((HEADS, DIM))
    for head in range(HEADS):
        scores = keys[:, head // each].astype(np.float64) @ q[0, head] * DIM**-0.5
        weights = np.exp(scores - scores.max())
        exact[head] = weights @ values[:, head // each] / weights.sum()
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("format", MOST)
def test_a_needle_costs_at_32k_what_it_costs_at_1k(machine: Machine, format: str) -> None:
    short, long = (lost(machine, format, context) for context in (SHORT, LONG))
    print(f"{format}: {short:.5f} at {SHORT}, {long:.5f} at {LONG}")
    assert short < MOST[format]
    assert long <= 1.2 * short
