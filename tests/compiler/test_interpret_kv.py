"""Paged tree attention over real page bytes, against dense attention over each row's own path."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlsdc.compiler.errors import IrError
from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.interpret import KvState, StepTree, interpret
from mlsdc.compiler.ops_core import Softmax
from mlsdc.compiler.ops_kv import AppendKv, Dequantise, Mask, MatMulPV, MatMulQK, PagedAttention, ReadKv, TreeMask
from mlsdc.compiler.ops_nn import Attention
from mlsdc.compiler.quantise import A8
from mlsdc.compiler.types import Dim, DType, KvType, TensorType, TreeType
from mlsdc.runtime.kv_format import KvGeometry, from_bf16, to_bf16
from mlsdc.runtime.step import Header, Limits, StepBuffers
from mlsdc.runtime.tree import Tree, ancestor_words

torch.set_num_threads(1)
PAGE, LAYERS, HEADS, KV_HEADS, DIM = 16, 2, 4, 2, 32
GEOMETRY = KvGeometry("bf16", PAGE, LAYERS, KV_HEADS, DIM)
ROWS, CTX = Dim("rows", 1, 64), Dim("ctx", 1, 128)


def attention_graph(window: int, softcap: float) -> Graph:
    """Layer 1's cache write, then attention fused (`fused`, `quantised`) and op by op (`unfused`)."""
    b = Builder("g")
    kv, tree = b.input("kv", KvType("bf16", PAGE, LAYERS, KV_HEADS, DIM)), b.input("tree", TreeType())
    q, k, v = (b.input(x, TensorType(DType.F32, (ROWS, heads, DIM))) for x, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)))
    kv = b.add("appended", AppendKv(1), kv, k, v, tree)
    stored = (b.add(which, ReadKv(1, which, ROWS, CTX), kv, tree) for which in ("keys", "values"))
    keys, values = (b.add(f"{name}_f32", Dequantise(), name) for name in stored)
    scores = b.add("scores", MatMulQK(0.2, softcap), q, keys)
    masked = b.add("masked", Mask(), scores, b.add("mask", TreeMask(ROWS, CTX, window), tree))
    unfused = b.add("unfused", MatMulPV(), b.add("probs", Softmax(), masked), values)
    fused = b.add("fused", PagedAttention(1, 0.2, window, softcap), q, kv, tree)
    quantised = b.add("quantised", PagedAttention(1, 0.2, window, softcap, quantise=True), q, kv, tree)
    return b.build(unfused=unfused, fused=fused, quantised=quantised, kv=kv)


@dataclass(frozen=True)
class Sequence:
    """`committed` tokens in pages, then a tree to verify (`tree`) or `chunk` prompt tokens to prefill."""

    committed: int
    tree: Tree | None
    chunk: int

    @property
    def rows(self) -> int:
        return len(self.tree) + 1 if self.tree is not None else self.chunk


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    if draw(st.booleans()):
        return Sequence(draw(st.integers(0, 40)), None, draw(st.integers(1, 6)))
    size = draw(st.integers(0, 7))
    return Sequence(draw(st.integers(0, 40)), Tree((0,) * size, tuple(draw(st.integers(-1, i - 1)) for i in range(size))), 0)


def step(batch: list[Sequence], random: np.random.Generator) -> tuple[StepTree, int]:
    """The batch's rows, every sequence with 4 pages and a scratch page, in random order; and the number of pages."""
    pages = random.permutation(5 * len(batch)).astype(np.int32).reshape(len(batch), 5)
    positions, row_seq, row_slot, words = [], [], [], []
    for i, sequence in enumerate(batch):
        row_seq += [i] * sequence.rows
        if sequence.tree is None:
            positions += range(sequence.committed, sequence.committed + sequence.chunk)
            row_slot += [-1] * sequence.chunk
            words += [0] * sequence.chunk
        else:
            positions += [sequence.committed, *(sequence.committed + depth for depth in sequence.tree.depths())]
            row_slot += range(sequence.rows)
            words += ancestor_words(sequence.tree)
    i32 = np.int32
    ctx = np.array([s.committed for s in batch], i32)
    by_row = (np.array(x, i32) for x in (positions, row_seq, row_slot))
    return StepTree(*by_row, np.array(words, np.uint64), ctx, pages[:, :4], pages[:, 4:]), pages.size


def rounded(x: np.ndarray) -> np.ndarray:
    return from_bf16(to_bf16(x))


def normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


@given(st.lists(sequences(), min_size=1, max_size=3), st.sampled_from([(0, 0.0), (5, 0.0), (0, 3.0)]), st.integers(0, 9))
def test_paged_tree_attention_is_dense_attention_over_each_rows_path(batch: list[Sequence], variant: tuple[int, float], seed: int) -> None:
    random = np.random.default_rng(seed)
    tree, num_pages = step(batch, random)
    q, k, v = normal(random, tree.num_rows, HEADS, DIM), *(normal(random, tree.num_rows, KV_HEADS, DIM) for _ in range(2))
    state = KvState.empty(GEOMETRY, num_pages, poison=255)
    past = [[normal(random, s.committed, KV_HEADS, DIM) for _ in range(2)] for s in batch]
    for i, (keys, values) in enumerate(past):
        prompt = replace(StepTree.prefill(len(keys), PAGE), page_table=tree.page_table[i : i + 1])
        state = state.append(1, prompt, keys, values)

    inputs = {"kv": state, "tree": tree, "q": q, "k": k, "v": v}
    found = interpret(attention_graph(*variant), inputs, lambda node: None)
    assert torch.equal(found["fused"], found["unfused"])

    first = 0
    for i, sequence in enumerate(batch):
        for row in range(first, first + sequence.rows):
            if sequence.tree is None:
                path = list(range(first, row + 1))
            else:
                path, node = [row], row - first - 1
                while node >= 0:
                    node = sequence.tree.parents[node]
                    path.insert(0, first + node + 1)
            keys, values = (torch.from_numpy(rounded(np.concatenate((old, new[path])))) for old, new in zip(past[i], (k, v), strict=True))
            queries = torch.zeros(len(keys), HEADS, DIM)
            queries[-1] = torch.from_numpy(q[row])
            b = Builder("dense")
            names = [b.input(x, TensorType(DType.F32, tuple(t.shape))) for x, t in (("q", queries), ("k", keys), ("v", values))]
            b.add("y", Attention(0.2, *variant), *names)
            dense = interpret(b.build(y="y"), {"q": queries, "k": keys, "v": values}, lambda node: None)["y"]
            torch.testing.assert_close(found["fused"][row], dense[-1], rtol=2e-5, atol=2e-6)  # type: ignore[index]
        first += sequence.rows


CHAIN = Tree((0, 0, 0), (-1, 0, 0))


def simple(tree: Tree = CHAIN, committed: int = 3) -> tuple[StepTree, int]:
    return step([Sequence(committed, tree, 0)], np.random.default_rng(0))


def test_append_leaves_the_state_before_it_as_it_was() -> None:
    tree, pages = simple()
    state = KvState.empty(GEOMETRY, pages, poison=7)
    k = normal(np.random.default_rng(0), tree.num_rows, KV_HEADS, DIM)
    after = state.append(0, tree, k, k)
    assert (state.pool == 7).all()
    assert (after.pool != 7).any()


def test_append_writes_the_rows_slots_and_nothing_else() -> None:
    tree, pages = simple()
    k = normal(np.random.default_rng(0), tree.num_rows, KV_HEADS, DIM)
    after = KvState.empty(GEOMETRY, pages, poison=7).append(1, tree, k, -k)
    written = {int(page) for page in np.nonzero((after.pool != 7).any(axis=1))[0]}
    assert written == {int(tree.scratch_table[0, 0])}
    k_block, v_block = GEOMETRY.blocks(after.pool[tree.scratch_table[0, 0]], 1, 1)
    keys, values = GEOMETRY.kv.read(k_block, v_block, DIM)
    assert np.array_equal(keys[:4], rounded(k[:, 1]))
    assert np.array_equal(values[:4], rounded(-k[:, 1]))
    untouched, _ = GEOMETRY.blocks(after.pool[tree.scratch_table[0, 0]], 0, 0)
    assert (untouched == 7).all()


def test_read_gives_zeros_where_a_row_does_not_see() -> None:
    tree, pages = simple(committed=0)
    k = normal(np.random.default_rng(0), tree.num_rows, KV_HEADS, DIM)
    keys, _ = KvState.empty(GEOMETRY, pages, poison=255).append(0, tree, k, k).read(0, tree)
    assert keys.shape == (4, KV_HEADS, 3, DIM)
    assert not keys[0, :, 1:].any()
    assert np.array_equal(keys[3, :, 2], rounded(k[3]))
    assert np.array_equal(keys[3, :, 1], rounded(k[1]))


def test_a_row_whose_ancestors_do_not_add_up_to_its_position_is_an_error() -> None:
    tree, pages = simple()
    tree.positions[2] += 1
    with pytest.raises(IrError, match=r"row 2: reads 3 \+ 3 positions, but its own is 6"):
        KvState.empty(GEOMETRY, pages).read(0, tree)


def test_quantised_attention_is_attention_quantised() -> None:
    tree, pages = simple()
    random = np.random.default_rng(0)
    inputs = {x: normal(random, 4, heads, DIM) for x, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}
    found = interpret(attention_graph(0, 0.0), {"kv": KvState.empty(GEOMETRY, pages), "tree": tree, **inputs}, lambda node: None)
    quantised, fused = found["quantised"], found["fused"]
    assert isinstance(quantised, A8)
    assert isinstance(fused, torch.Tensor)
    assert np.abs(quantised.dequantise() - fused.reshape(4, -1).numpy()).max() <= float(fused.abs().max()) / 254 * 1.001


def test_a_cache_of_another_geometry_is_an_error() -> None:
    state = KvState.empty(KvGeometry("bf16", 32, LAYERS, KV_HEADS, DIM), 1)
    with pytest.raises(IrError, match=r"%kv: has type kv<bf16, page=16, .*its value is kv<bf16, page=32"):
        interpret(attention_graph(0, 0.0), {"kv": state}, lambda node: None)


def test_a_tree_comes_from_the_steps_buffers() -> None:
    buffers = StepBuffers(Limits(64, 4, 16, 4, 7), PAGE)
    buffers.header[Header.ROWS], buffers.header[Header.SEQS] = 3, 2
    buffers.positions[:4] = 5, 6, 0, 9
    buffers.row_slot[:3] = 0, 1, -1
    buffers.ancestors[:3] = 1, 3, 0
    tree = StepTree.from_buffers(buffers)
    assert tree.positions.tolist() == [5, 6, 0]
    assert (tree.page_table.shape, tree.scratch_table.shape) == ((2, 4), (2, 1))
    assert (tree.ctx, tree.slots(1), tree.slots(2)) == (7, [0, 1], [])
    buffers.positions[:] = 0
    assert tree.ctx == 7


@pytest.mark.parametrize("format", ["int4", "int2/int8@1=bf16"])
def test_a_grouped_format_is_read_by_position(format: str) -> None:
    """Law L3: a group that ends at p - R or before as its page has it, the rest and drafted rows in 16 bits; in any chunks."""
    geometry = KvGeometry(format, 16, 2, 1, 32)
    random = np.random.default_rng(0)
    tokens, drafts = 70, 3
    k, v = (random.standard_normal((tokens + drafts, 1, 32), np.float32) for _ in range(2))
    states = []
    for chunk in (tokens, 13):
        state = KvState.empty(geometry, 7, poison=255)
        for start in range(0, tokens, chunk):
            end = min(tokens, start + chunk)
            whole = StepTree.prefill(end, 16)
            part = replace(whole, positions=whole.positions[start:], row_seq=whole.row_seq[start:], row_slot=whole.row_slot[start:],
                           ancestors=whole.ancestors[start:])
            for layer in range(2):
                state = state.append(layer, part, k[start:end], v[start:end])
        states.append(state)
    assert np.array_equal(states[0].pool[:4], states[1].pool[:4])
    i32 = np.int32
    tree = StepTree(np.arange(tokens, tokens + drafts, dtype=i32), np.zeros(drafts, i32), np.arange(drafts, dtype=i32),
                    np.array([1, 3, 7], np.uint64), np.array([tokens], i32), np.arange(5, dtype=i32)[None], np.array([[6]], i32))
    for layer in range(2):
        kv = geometry.layer_format(layer)
        keys, values = states[1].append(layer, tree, k[tokens:], v[tokens:]).read(layer, tree)
        pages = [geometry.read(page, layer, 0) for page in states[1].pool[:2]]
        wanted_k, wanted_v = (np.concatenate([page[i] for page in pages]) for i in range(2))
        quantised, plain = slice(16, 32), (*range(16), *range(32, tokens + 3))
        assert np.array_equal(keys[2, 0, quantised], wanted_k[quantised])
        assert np.array_equal(values[2, 0, quantised], wanted_v[quantised])
        assert np.array_equal(keys[2, 0, plain], rounded(k[plain, 0]))
        if not kv.values.rotated:
            assert np.array_equal(values[2, 0, plain], rounded(v[plain, 0]))
        assert np.abs(values[2, 0, plain] - v[plain, 0]).max() < 0.02
        assert np.abs(values[2, 0, quantised] - v[quantised, 0]).max() > 0.02 or kv.values.name != "int4"
