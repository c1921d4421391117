"""Windows with sinks on the CPU: a row reads the last positions and the first few, and nothing of the pages between."""

from __future__ import annotations

import numpy as np
import pytest

from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.ops_kv import PagedAttention, TreeMask
from mlsdc.compiler.types import Dim, DType, KvType, TensorType, TreeType
from mlsdc.runtime.kv_window import KvWindow
from mlsdc.runtime.step import Header, Limits
from tests.targets.attention_vectors import Case, Shape, drafted, lay_out, prefilled, random_batch, random_parents
from tests.targets.cpu_machine import Array, Machine, get

LIMITS = Limits(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64, max_logit_rows=16, max_tree_nodes=30)
ROWS = Dim("rows", 1, LIMITS.max_num_batched_tokens)
SHAPES = {
    "bf16": Shape(9, 3, 64, page_size=32, window=100, sinks=4), "int8": Shape(4, 2, 80, page_size=16, format="int8", window=64, sinks=20),
    "small pages": Shape(9, 3, 64, page_size=16, window=64, sinks=4),
    "fp8": Shape(4, 2, 64, page_size=16, format="fp8", window=64, sinks=4),
    "capped": Shape(2, 1, 64, page_size=64, format="fp8/int4-token", window=70, sinks=1, softcap=2.0),
}  # fmt: skip


def graph_of(shape: Shape) -> Graph:
    g = shape.geometry
    b = Builder(f"sinks {shape}")
    q = b.input("q", TensorType(DType.F32, (ROWS, shape.heads, shape.head_dim)))
    kv = b.input("kv", KvType(g.format, g.page_size, g.num_layers, g.num_kv_heads, g.head_dim))
    tree = b.input("tree", TreeType())
    b.add("mask", TreeMask(ROWS, Dim("ctx", 1, LIMITS.max_model_len), shape.window, shape.sinks), tree)
    op = PagedAttention(shape.layer, shape.scale, shape.window, shape.softcap, sinks=shape.sinks)
    return b.build(result=b.add("result", op, q, kv, tree), mask="mask")


GRAPHS = {name: graph_of(shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine.build(tmp_path_factory, "cpu-sinks", LIMITS, GRAPHS.values())


def run(machine: Machine, name: str, case: Case) -> tuple[Array, Array]:
    """Attention f32[rows, heads, d] and the mask u8[rows, context]."""
    memory = machine.run(GRAPHS[name], {"q": case.q}, case.buffers, case.pool.copy())
    rows = case.num_rows
    return get(memory["result"], rows, SHAPES[name].heads, SHAPES[name].head_dim), memory["mask"].view(np.uint8)


def allowed(shape: Shape) -> float:
    return 2e-4 if "int" in shape.format else 1e-5


@pytest.mark.parametrize("name", SHAPES)
def test_rows_read_the_window_and_the_sinks(machine: Machine, name: str) -> None:
    shape = SHAPES[name]
    for seed in range(4):
        rng = np.random.default_rng(seed)
        case = lay_out(shape, random_batch(rng, shape, limits=LIMITS), pages_seed=seed, limits=LIMITS)
        assert np.abs(run(machine, name, case)[0] - case.expected).max() < allowed(shape)


@pytest.mark.parametrize("ctx", [3, 63, 64, 100, 165, 256, 333, *range(387, 422, 7), 449])
def test_pages_of_the_gap_may_name_any_page_of_the_sequence(machine: Machine, ctx: int) -> None:
    for name, shape in SHAPES.items():
        rng = np.random.default_rng(ctx)
        case = lay_out(shape, [drafted(rng, shape, ctx, random_parents(rng, 20)), prefilled(rng, shape, ctx, 20)], limits=LIMITS)
        wanted, _ = run(machine, name, case)
        start, end = KvWindow(shape.window, shape.sinks).gap(ctx, shape.page_size)
        case.buffers.page_table[:2, start:end] = case.buffers.page_table[:2, start - 1 : start]
        found, _ = run(machine, name, case)
        assert np.array_equal(found, wanted)
        assert np.abs(found - case.expected).max() < allowed(shape)


def test_the_mask_says_what_is_read(machine: Machine) -> None:
    shape = SHAPES["int8"]
    rng = np.random.default_rng(0)
    case = lay_out(shape, [prefilled(rng, shape, 140, 40)], limits=LIMITS)
    mask = run(machine, "int8", case)[1].reshape(-1)
    stride = mask.size // LIMITS.max_num_batched_tokens
    for row in range(int(case.buffers.header[Header.ROWS])):
        p = 140 + row
        assert mask[row * stride :][: p + 1].tolist() == [int(j > p - shape.window or j < shape.sinks) for j in range(p + 1)]
