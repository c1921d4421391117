"""Mixtures of experts on the CPU: kernels against the interpreter, exact for any batch, and experts that nobody chose are never read."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from mlsdc.compiler.graph import Builder, Graph, Node
from mlsdc.compiler.interpret import interpret
from mlsdc.compiler.ops_core import Binary, Reduce, Reshape, Softmax, Unary
from mlsdc.compiler.ops_moe import ExpertLinear, ExpertLinearQ, Take, TopIndex
from mlsdc.compiler.ops_nn import Embed, Linear
from mlsdc.compiler.ops_quant import Quantise
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.runtime.bench.traffic import traffic
from mlsdc.runtime.device.cpu import CpuLevel
from mlsdc.runtime.step import Limits
from tests.passes.graphs import MAX_LEN, prefill
from tests.targets.cpu_level import loaded, run

LIMITS = Limits(max_model_len=MAX_LEN, max_num_seqs=4, max_num_batched_tokens=64, max_logit_rows=64, max_tree_nodes=15)
ROWS = Dim("rows", 1, 64)
EXPERTS, SLOTS, HIDDEN, INNER = 5, 2, 160, 224  # an expert's rows take several pages of memory in every format
PAGE, PROT_NONE, PROT_READ = mmap.PAGESIZE, 0, mmap.PROT_READ
NUM_ROWS = 21  # a tile of 8, another, and a ragged one


def weight(b: Builder, name: str, dtype: DType, *shape: int) -> str:
    return b.weight(f"w.{name}", TensorType(dtype, shape))


def moe_graph(dtype: DType) -> Graph:
    """A router and two expert linears over rows picked by token; every value is a result."""
    b = Builder("moe")
    b.input("tokens", TensorType(DType.I32, (ROWS,)))
    x = b.add("x", Embed(), "tokens", weight(b, "x", DType.F32, 64, HIDDEN))
    probabilities = b.add("probabilities", Softmax(), b.add("router", Linear(), x, weight(b, "router", DType.F32, EXPERTS, HIDDEN)))
    index = b.add("index", TopIndex(SLOTS), probabilities)
    taken = b.add("taken", Take(), probabilities, index)
    shares = b.add("shares", Binary("div"), taken, b.add("total", Reduce("sum", 1), taken))
    up, down = weight(b, "up", dtype, EXPERTS * INNER, HIDDEN), weight(b, "down", dtype, EXPERTS * HIDDEN, INNER)
    if dtype is DType.F32:
        inner = b.add("inner", ExpertLinear(EXPERTS), b.add("apart", Reshape((-1, 1, HIDDEN)), x), up, index)
        outer = b.add("outer", ExpertLinear(EXPERTS), b.add("act", Unary("silu"), inner), down, index)
    else:
        inner = b.add("inner", ExpertLinearQ(EXPERTS), b.add("x.a8", Quantise(), x), up, index)
        act = b.add("act", Unary("silu"), inner)
        flat = b.add("act.a8", Quantise(), b.add("flat", Reshape((-1, SLOTS * INNER)), act))
        outer = b.add("outer", ExpertLinearQ(EXPERTS, SLOTS), flat, down, index)
    scaled = b.add("scaled", Binary("mul"), outer, b.add("shares.apart", Reshape((-1, SLOTS, 1)), shares))
    b.add("y", Reshape((-1, HIDDEN)), b.add("summed", Reduce("sum", 1), scaled))
    b.add("largest", Reduce("max", 2), outer)
    b.add("mean", Reduce("mean", 1), x)
    shown = ("index", "taken", "total", "inner", "outer", "summed", "largest", "mean")
    graph = Graph("moe", tuple(b.nodes.values()), tuple((name, name) for name in shown))
    graph.verify()
    return graph


def random_weight(node: Node) -> torch.Tensor:
    assert isinstance(node.type, TensorType)
    seed = sum(node.name.encode())
    shape = tuple(n for n in node.type.shape if isinstance(n, int))
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5


@pytest.fixture(scope="module", params=["f32", "q8", "q4"])
def moe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Graph, CpuLevel]]:
    graph = moe_graph(DType(request.param))
    with loaded({"moe": graph}, random_weight, tmp_path_factory.mktemp("moe"), LIMITS) as level:
        yield graph, level


def test_every_kernel_agrees_with_the_interpreter(moe: tuple[Graph, CpuLevel]) -> None:
    graph, level = moe
    step = prefill(range(NUM_ROWS))
    found, wanted = run(level, "moe", step), interpret(graph, step, random_weight)
    assert len(np.unique(found["index"])) == EXPERTS
    for name, value in wanted.items():
        assert isinstance(value, torch.Tensor)
        np.testing.assert_allclose(found[name], value.numpy(), rtol=1e-5, atol=5e-6, err_msg=name)


def test_a_rows_numbers_do_not_depend_on_the_batch(moe: tuple[Graph, CpuLevel]) -> None:
    """Law L2: the same bits for any number of rows beside it, and in any of their places."""
    _, level = moe
    tokens = list(range(NUM_ROWS))
    whole = run(level, "moe", prefill(tokens))
    for size in (1, 2, 3, 4, 5, 7, 8, 9, 17):
        for part in batched(tokens[::-1], size):
            found = run(level, "moe", prefill(part))
            for name, value in found.items():
                if name != "choices":
                    assert np.array_equal(value, whole[name][list(part)]), (name, size)


@pytest.mark.parametrize("rows", [1, 2])
def test_experts_that_no_row_chose_are_not_read(moe: tuple[Graph, CpuLevel], rows: int) -> None:
    """Their memory is taken away while the program runs: reading one byte of it would end the process."""
    graph, level = moe
    tokens = next(start for start in range(30) if len(chosen(level, range(start, start + rows))) == rows * SLOTS)
    step = prefill(range(tokens, tokens + rows))
    wanted, hit = run(level, "moe", step), chosen(level, range(tokens, tokens + rows))
    sizes = {name: len(level.weights[name]) for name in ("w.up", "w.down")}
    guarded = [part for name, size in sizes.items() for part in pages(level.weights[name], size, set(range(EXPERTS)) - hit)]
    assert sum(length for _, length in guarded) > (EXPERTS - len(hit) - 1) / EXPERTS * sum(sizes.values())
    for address, length in guarded:
        protect(address, length, PROT_NONE)
    try:
        found = run(level, "moe", step)
    finally:
        for address, length in guarded:
            protect(address, length, PROT_READ)
    assert all(np.array_equal(value, wanted[name]) for name, value in found.items())
    program = level.programs["moe"].spec  # type: ignore[attr-defined]
    experts = traffic(program, {name: len(value) for name, value in level.weights.items()}, 64, level.geometry, rows=rows, positions=1)
    others = sum(len(level.weights[name]) for name in ("w.router",)) + len(level.weights["w.x"]) * rows // 64
    assert experts.weights == others + sum(size * len(hit) // EXPERTS for size in sizes.values())


def chosen(level: CpuLevel, tokens: Sequence[int]) -> set[int]:
    return set(run(level, "moe", prefill(tokens))["index"].reshape(-1).tolist())


def pages(values: np.ndarray, size: int, experts: set[int]) -> Iterator[tuple[int, int]]:
    """The whole pages of memory that hold nothing but the experts' rows: (address, bytes)."""
    start, each = values.ctypes.data, size // EXPERTS
    for expert in sorted(experts):
        first = -(-(start + expert * each) // PAGE) * PAGE
        last = (start + (expert + 1) * each) // PAGE * PAGE
        if last > first:
            yield first, last - first


def protect(address: int, length: int, mode: int) -> None:
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(length), mode) == 0


def batched(values: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
