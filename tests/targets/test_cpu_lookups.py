"""CPU kernels that find rows and ids: embeddings, angles, gathered rows, the largest of a row, against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsdc.compiler import ops_core, ops_nn
from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.quantise import quantise_q8
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.runtime.step import Limits
from tests.targets.cpu_machine import Machine, counted, get, one_by_one_backwards, whole

Array = npt.NDArray[Any]
LIMITS = Limits(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=24, max_logit_rows=24, max_tree_nodes=15)
ROWS, OUT = Dim("rows", 1, 24), Dim("out", 1, 24)
ARGMAX = ((96, 0), (1008, 1000), (32, 7), (4096, 4090), (48, 48))


def f32(*shape: int | Dim) -> TensorType:
    return TensorType(DType.F32, shape)


def embed_graph(scale: float, dtype: DType = DType.Q8) -> Graph:
    b = Builder(f"embed {scale} {dtype}")
    tokens, table = b.input("tokens", TensorType(DType.I32, (ROWS,))), b.weight("w0", TensorType(dtype, (100, 96)))
    return b.build(result=b.add("result", ops_nn.Embed(scale), tokens, table))


def table_graph(half: int, scaling: float) -> Graph:
    b = Builder(f"rope table {half}")
    positions, freq = b.input("positions", TensorType(DType.I32, (ROWS,))), b.weight("w0", f32(half))
    return b.build(result=b.add("result", ops_nn.RopeTable(scaling), positions, freq))


def gather_graph() -> Graph:
    b = Builder("gather")
    x, index = b.input("in0", f32(ROWS, 40)), b.input("out_rows", TensorType(DType.I32, (OUT,)))
    return b.build(result=b.add("result", ops_core.GatherRows(), x, index))


def argmax_graph(n: int, limit: int) -> Graph:
    b = Builder(f"argmax {n} {limit}")
    return b.build(result=b.add("result", ops_core.ArgMax(limit), b.input("in0", f32(OUT, n))))


GRAPHS = {
    **{f"embed {s}": embed_graph(s) for s in (1.0, 8.0)},
    **{f"embed bf16 {s}": embed_graph(s, DType.BF16) for s in (1.0, 8.0)},
    **{f"table {h}": table_graph(h, s) for h, s in ((32, 1.0), (20, 1.25))},
    **{f"argmax {n} {limit}": argmax_graph(n, limit) for n, limit in ARGMAX},
    "gather": gather_graph(),
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    torch.set_num_threads(1)
    return Machine.build(tmp_path_factory, "cpu-lookups", LIMITS, GRAPHS.values())


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_embedding_rows_are_the_tables_dequantised(machine: Machine, scale: float) -> None:
    rng = np.random.default_rng(1)
    table = quantise_q8(rng.standard_normal((100, 96), np.float32))
    for rows in (1, 8, 20):
        tokens = rng.choice([0, 1, 15, 16, 98, 99], rows)
        buffers = counted(LIMITS, rows)
        buffers.tokens[:rows] = tokens
        memory = machine.run(GRAPHS[f"embed {scale}"], {"w0": table}, buffers)
        assert np.array_equal(get(memory["result"], rows, 96), (table[tokens].dequantise() * np.float32(scale)))


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_embedding_rows_are_the_bf16_tables(machine: Machine, scale: float) -> None:
    rng = np.random.default_rng(1)
    table = rng.standard_normal((100, 96), np.float32)
    tokens = rng.choice([0, 1, 15, 16, 98, 99], 20)
    buffers = counted(LIMITS, 20)
    buffers.tokens[:20] = tokens
    found = get(machine.run(GRAPHS[f"embed bf16 {scale}"], {"w0": table}, buffers)["result"], 20, 96)
    assert np.array_equal(found, torch.from_numpy(table).to(torch.bfloat16).float().numpy()[tokens] * np.float32(scale))


@pytest.mark.parametrize(("half", "scaling"), [(32, 1.0), (20, 1.25)])
def test_rope_angles_are_right_up_to_long_contexts(machine: Machine, half: int, scaling: float) -> None:
    freq = (1e4 ** -(np.arange(half) / half)).astype(np.float32)
    positions = np.array([0, 1, 2, 3, 4095, 4096, 65535, 99_991, 100_000, 131_071, 1_000_003, 16_777_215] * 2, np.int32)
    buffers = counted(LIMITS, len(positions))
    buffers.positions[:] = positions
    table = get(machine.run(GRAPHS[f"table {half}"], {"w0": freq}, buffers)["result"], len(positions), 2, half)
    angles = (positions.astype(np.float32)[:, None] * freq).astype(np.float64)  # the f32 product is the definition
    exact = np.stack((np.cos(angles), np.sin(angles)), axis=1) * scaling
    assert np.abs(table - exact).max() <= scaling * 2.0**-23
    assert np.array_equal(table[0, 0], np.full(half, np.float32(scaling)))
    assert not table[0, 1].any()


def test_gathered_rows_are_copies(machine: Machine) -> None:
    x = np.random.default_rng(0).standard_normal((17, 40), np.float32)
    index = np.array([16, 0, 3, 3, 8], np.int32)
    buffers = counted(LIMITS, 17, len(index))
    buffers.out_rows[: len(index)] = index
    assert np.array_equal(get(machine.run(GRAPHS["gather"], {"in0": x}, buffers)["result"], len(index), 40), x[index])


def argmax(machine: Machine, n: int, limit: int, x: Array, ranges: Any = whole) -> list[int]:
    memory = machine.run(GRAPHS[f"argmax {n} {limit}"], {"in0": x}, counted(LIMITS, 1, len(x)), ranges=ranges)
    return [int(i) for i in get(memory["result"], len(x), dtype="i4")]


@pytest.mark.parametrize(("n", "limit"), ARGMAX)
@given(data=st.data())
@settings(max_examples=25)
def test_argmax_is_the_lowest_of_the_largest_below_its_limit(machine: Machine, n: int, limit: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows, few = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 2, 3, 1000]))
    x = rng.integers(-few, few, (rows, n)).astype(np.float32)  # few values: many ties
    x[:, limit or n :] = np.inf  # padding ids are never chosen
    wanted = x[:, : limit or n].argmax(-1).tolist()
    assert argmax(machine, n, limit, x) == wanted
    assert argmax(machine, n, limit, x, one_by_one_backwards) == wanted


@pytest.mark.parametrize(("n", "limit"), ARGMAX)
def test_argmax_finds_a_single_peak_at_every_place(machine: Machine, n: int, limit: int) -> None:
    last = limit or n
    for start in range(0, last, 24 * 37):
        peaks = sorted({min(last - 1, start + 37 * i + start % 37) for i in range(24)} | {0, last - 1})[:24]
        x = np.full((len(peaks), n), -1.0, np.float32)
        x[np.arange(len(peaks)), peaks] = -0.5
        assert argmax(machine, n, limit, x) == peaks


@pytest.mark.parametrize(("n", "limit"), ARGMAX)
def test_argmax_of_rows_that_are_not_numbers_is_an_id(machine: Machine, n: int, limit: int) -> None:
    x = np.full((5, n), -np.inf, np.float32)
    x[1] = np.nan
    x[2, 5] = np.inf
    x[3], x[3, 5] = np.nan, 1.0  # the only number wins
    x[4, 6] = -3e38
    assert argmax(machine, n, limit, x) == [0, 0, 5, 5, 6]
