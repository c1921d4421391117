"""CPU kernels that compute rows: numbers against the reference interpreter's, and rows that depend on nothing but themselves (law L2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsdc.compiler import ops_nn, ops_quant
from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.interpret_core import UNARY, normalised, rotated
from mlsdc.compiler.ops import Op
from mlsdc.compiler.quantise import A8, F8, Q4, Q8, quantise_a8, quantise_f8, quantise_q4, quantise_q8
from mlsdc.compiler.types import GROUP, Dim, DType, TensorType
from mlsdc.runtime.kv_numbers import from_e4m3
from mlsdc.runtime.step import Limits
from tests.targets.cpu_machine import Machine, counted, get, get_a8, whole

Array = npt.NDArray[Any]
LIMITS = Limits(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=24, max_logit_rows=24, max_tree_nodes=15)
ROWS, OUT = Dim("rows", 1, 24), Dim("out", 1, 24)
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17)


@dataclass(frozen=True)
class Kernel:
    """A node `result` over inputs of these types, row-wise ones first; `weights` names those that are not row-wise."""

    op: Op
    inputs: tuple[TensorType, ...]
    weights: tuple[TensorType, ...] = ()

    def graph(self, name: str) -> Graph:
        b = Builder(name)
        order = [b.input(f"in{i}", type_) for i, type_ in enumerate(self.inputs)]
        order[1:1] = [b.weight(f"w{i}", type_) for i, type_ in enumerate(self.weights)]
        return b.build(result=b.add("result", self.op, *order))

    @property
    def by_out(self) -> bool:
        return self.inputs[0].shape[0] is OUT


def f32(*shape: int | Dim) -> TensorType:
    return TensorType(DType.F32, shape)


def linear(n: int, k: int, *, bias: bool = False, residual: bool = False, rows: Dim = ROWS, weights: DType = DType.Q8) -> Kernel:
    inputs = (TensorType(DType.A8, (rows, k)), *((f32(rows, n),) if residual else ()))
    return Kernel(ops_quant.LinearQ(bias, residual), inputs, (TensorType(weights, (n, k)), *((f32(n),) if bias else ())))


def gated(n: int, k: int, act: str, weights: DType = DType.Q8) -> Kernel:
    return Kernel(ops_quant.GatedQuantise(act), (TensorType(DType.A8, (ROWS, k)),), (TensorType(weights, (2 * n, k)),))


def plain(n: int, k: int, *, bias: bool = False, weights: DType = DType.BF16) -> Kernel:
    return Kernel(ops_nn.Linear(), (f32(ROWS, k),), (TensorType(weights, (n, k)), *((f32(n),) if bias else ())))


def norm(k: int, eps: float, offset: float = 0.0, rows: Dim = ROWS) -> Kernel:
    return Kernel(ops_quant.NormQuantise(eps, offset), (f32(rows, k),), (f32(k),))


LINEARS = {
    "linear": linear(48, 64), "linear of one group": linear(16, 32), "linear that pads": linear(112, 160),
    "bias": linear(48, 96, bias=True),
    "residual": linear(64, 576, residual=True), "bias and residual": linear(16, 96, bias=True, residual=True),
    "head": linear(1008, 96, rows=OUT),
    "q4": linear(48, 64, weights=DType.Q4), "q4 of one group": linear(16, 32, weights=DType.Q4),
    "q4 that pads": linear(112, 160, weights=DType.Q4), "q4 residual": linear(64, 576, residual=True, weights=DType.Q4),
    "q4 bias and residual": linear(16, 96, bias=True, residual=True, weights=DType.Q4),
}  # fmt: skip
PLAIN = {"bf16": plain(48, 64), "bf16 bias": plain(64, 576, bias=True), "bf16 of few rows": plain(9, 34, bias=True),
         "f8": plain(48, 64, weights=DType.F8), "f8 bias": plain(64, 576, bias=True, weights=DType.F8),
         "f8 of few rows": plain(9, 34, bias=True, weights=DType.F8), "f8 of one row": plain(1, 62, weights=DType.F8)}
GATED = {"silu": gated(128, 96, "silu"), "gelu_tanh": gated(64, 64, "gelu_tanh"), "wide silu": gated(192, 160, "silu"),
         "q4 silu": gated(128, 96, "silu", DType.Q4), "q4 gelu_tanh": gated(64, 160, "gelu_tanh", DType.Q4),
         "silu that pads": gated(96, 64, "silu"), "q4 silu that pads": gated(32, 32, "silu", DType.Q4)}  # fmt: skip
QUANTISERS = {
    "quantise": Kernel(ops_quant.Quantise(), (f32(ROWS, 96),)), "quantise whole": Kernel(ops_quant.Quantise(), (f32(ROWS, 128),)),
    "norm": norm(576, 1e-5), "norm that pads": norm(96, 1e-6), "gemma norm": norm(64, 1e-6, 1.0), "head norm": norm(32, 1e-5, rows=OUT),
}  # fmt: skip
ROPES = {
    "rope": Kernel(ops_nn.Rope(), (f32(ROWS, 3, 64), f32(ROWS, 2, 32))),
    "narrow rope": Kernel(ops_nn.Rope(), (f32(ROWS, 2, 80), f32(ROWS, 2, 40))),
    "partial rope": Kernel(ops_nn.Rope(), (f32(ROWS, 2, 64), f32(ROWS, 2, 12))),
    "odd partial rope": Kernel(ops_nn.Rope(), (f32(ROWS, 2, 32), f32(ROWS, 2, 5))),
    "rope slice": Kernel(ops_quant.RopeSlice(64, 2, 32), (f32(ROWS, 192), f32(ROWS, 2, 16))),
}  # fmt: skip
ROW_WISE = {**LINEARS, **PLAIN, **GATED, **QUANTISERS, **ROPES}


GRAPHS = {name: kernel.graph(name) for name, kernel in ROW_WISE.items()}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    torch.set_num_threads(1)
    return Machine.build(tmp_path_factory, "cpu-kernels", LIMITS, GRAPHS.values())


def random_of(rng: np.random.Generator, type_: TensorType, rows: int) -> Any:
    """A value of a type; rows, groups and columns of very different sizes, some groups of zeros."""
    shape = [size if isinstance(size, int) else rows for size in type_.shape]
    x = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-6, 7, (*shape[:-1], 1))).astype(np.float32)
    if len(shape) == 2 and shape[-1] % GROUP == 0:
        x.reshape(shape[0], -1, GROUP)[rng.random((shape[0], shape[1] // GROUP)) < 0.1] = 0
    return QUANTISE[type_.dtype](x) if type_.dtype in QUANTISE else x


def bf16(x: Array) -> Array:
    """Values that bf16 holds."""
    cut: Array = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return cut


QUANTISE = {DType.BF16: bf16, DType.A8: quantise_a8, DType.Q8: lambda x: quantise_q8(x / 8), DType.Q4: lambda x: quantise_q4(x / 8),
            DType.F8: quantise_f8}


def inputs_of(kernel: Kernel, rows: int, seed: int) -> tuple[list[Any], list[Any]]:
    """(row-wise inputs, weights)"""
    rng = np.random.default_rng(seed)
    return [random_of(rng, type_, rows) for type_ in kernel.inputs], [random_of(rng, type_, 0) for type_ in kernel.weights]


def run(machine: Machine, name: str, inputs: list[Any], weights: list[Any], ranges: Any = whole) -> tuple[Array, ...]:
    """The result of a row-wise kernel: (codes, scales, corrections) of an a8, else (f32 rows,)."""
    kernel, graph = ROW_WISE[name], GRAPHS[name]
    rows = len(inputs[0].codes if isinstance(inputs[0], A8) else inputs[0])
    values = {f"in{i}": x for i, x in enumerate(inputs)} | {f"w{i}": x for i, x in enumerate(weights)}
    buffers = counted(LIMITS, 0 if kernel.by_out else rows, rows if kernel.by_out else 0)
    memory = machine.run(graph, values, buffers, ranges=ranges)["result"]
    type_ = graph["result"].type
    assert isinstance(type_, TensorType)
    if type_.dtype is DType.A8:
        a8, corrections = get_a8(memory, type_, rows)
        return a8.codes, a8.scales, corrections
    return (get(memory, rows, *[size for size in type_.shape if isinstance(size, int)]),)


def pick(value: Any, rows: Any) -> Any:
    return A8(value.codes[rows], value.scales[rows]) if isinstance(value, A8) else value[rows]


def f64(value: A8 | Q8 | Q4 | F8 | Array) -> Array:
    if isinstance(value, F8):
        return from_e4m3(value.codes).astype(np.float64) * value.scales[:, None].astype(np.float64)
    return (value.dequantise() if isinstance(value, A8 | Q8 | Q4) else value).astype(np.float64)


def size_of(weight: Q8 | Q4) -> Array:
    """Sum of the sizes of the terms of each weight: what its rounding is relative to."""
    if isinstance(weight, Q8):
        return np.abs(f64(weight))
    return f64(Q4(weight.codes, np.abs(weight.scales), np.abs(weight.mins)))


# --- numbers ---


@pytest.mark.parametrize("rows", COUNTS)
@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_is_within_its_rounding_of_float64(machine: Machine, name: str, rows: int) -> None:
    inputs, weights = inputs_of(LINEARS[name], rows, rows)
    (y,) = run(machine, name, inputs, weights)
    terms = [*weights[1:], *inputs[1:]]
    exact = f64(inputs[0]) @ f64(weights[0]).T + sum(f64(t) for t in terms)
    # every group's dot is a whole number: what rounds is one product of scales (q4: and an fma) and one fma a group, and one sum a term
    size = np.abs(f64(inputs[0])) @ size_of(weights[0]).T + sum(np.abs(f64(t)) for t in terms)
    roundings = weights[0].scales.shape[1] + (4 if isinstance(weights[0], Q4) else 3)
    assert (np.abs(y - exact) <= size * roundings * 2.0**-24).all()


@pytest.mark.parametrize("rows", COUNTS)
@pytest.mark.parametrize("name", PLAIN)
def test_a_linear_over_bf16_or_f8_weights_is_within_its_rounding_of_float64(machine: Machine, name: str, rows: int) -> None:
    (x,), weights = inputs_of(PLAIN[name], rows, rows)
    (y,) = run(machine, name, [x], weights)
    exact = f64(x) @ f64(weights[0]).T + sum(f64(t) for t in weights[1:])
    size = np.abs(f64(x)) @ np.abs(f64(weights[0])).T + sum(np.abs(f64(t)) for t in weights[1:])
    assert (np.abs(y - exact) <= size * (x.shape[1] / 2 + 2) * 2.0**-24).all()


@pytest.mark.parametrize("rows", COUNTS)
@pytest.mark.parametrize("name", QUANTISERS)
def test_a_quantised_row_is_the_nearest_code_of_float64(machine: Machine, name: str, rows: int) -> None:
    kernel = QUANTISERS[name]
    inputs, weights = inputs_of(kernel, rows, rows)
    op, x = kernel.op, torch.from_numpy(f64(inputs[0]))
    exact = normalised(x, torch.from_numpy(weights[0]), op.eps, op.offset) if isinstance(op, ops_quant.NormQuantise) else x
    assert_quantised(run(machine, name, inputs, weights), exact.numpy())


@pytest.mark.parametrize("rows", COUNTS)
@pytest.mark.parametrize("name", GATED)
def test_a_gated_row_is_the_nearest_code_of_float64(machine: Machine, name: str, rows: int) -> None:
    kernel = GATED[name]
    assert isinstance(kernel.op, ops_quant.GatedQuantise)
    inputs, weights = inputs_of(kernel, rows, rows)
    gate, up = torch.from_numpy(f64(inputs[0]) @ f64(weights[0]).T).chunk(2, dim=-1)
    # float32 sums behind the activation: a few parts in 10^6 of the largest of the terms
    size = np.abs(f64(inputs[0])) @ size_of(weights[0]).T
    slack = 4e-6 * (size[:, : gate.shape[1]] * np.abs(up.numpy()) + np.abs(gate.numpy()) * size[:, gate.shape[1] :]) + 1e-12
    assert_quantised(run(machine, name, inputs, weights), (UNARY[kernel.op.act](gate) * up).numpy(), slack)


def assert_quantised(found: tuple[Array, ...], exact: Array, slack: Array | float = 0.0) -> None:
    """codes * scale is within half a step of the exact values, a group's largest value has code 127, zeros and padding are zero."""
    codes, scales, corrections = found
    k = exact.shape[1]
    assert not codes[:, k:].any()
    assert not scales[:, k // GROUP :].any()
    assert np.array_equal(corrections, -128 * codes.reshape(len(codes), -1, GROUP).astype(np.int32).sum(-1))
    codes, scales = codes[:, :k], scales[:, : k // GROUP]
    slack = np.broadcast_to(slack, exact.shape)
    tops = np.abs(exact).reshape(len(exact), -1, GROUP).max(-1)
    loose = slack.reshape(len(exact), -1, GROUP).max(-1)
    assert (np.abs(scales - tops / 127) <= tops / 127 * 2e-6 + loose).all()
    step = np.repeat(scales.astype(np.float64), GROUP, axis=1)
    error = np.abs(codes * step - exact)
    assert (error <= 0.5 * step * (1 + 1e-4) + slack * 1.01).all()
    assert (np.abs(codes.reshape(len(codes), -1, GROUP)).max(-1)[tops > 0] == 127).all()
    assert not codes.reshape(len(codes), -1, GROUP)[tops == 0].any()
    assert np.abs(codes.astype(int)).max(initial=0) <= 127


def test_plain_quantising_gives_the_codes_of_the_definition(machine: Machine) -> None:
    inputs, _ = inputs_of(QUANTISERS["quantise"], 17, 3)
    codes, scales, _ = run(machine, "quantise", inputs, [])
    wanted = quantise_a8(inputs[0])
    assert (np.abs(codes[:, :96].astype(int) - wanted.codes) <= 1).all()
    assert (codes[:, :96] == wanted.codes).mean() > 0.999  # x * (127 / max) and x / (max / 127) differ at ties only
    assert np.allclose(scales[:, :3], wanted.scales, rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", ROPES)
def test_rope_is_the_rotation_rounded_twice(machine: Machine, name: str) -> None:
    kernel = ROPES[name]
    (x, table), _ = inputs_of(kernel, 9, 0)
    (y,) = run(machine, name, [x, table], [])
    if isinstance(kernel.op, ops_quant.RopeSlice):
        x = x[:, 64:128].reshape(9, 2, 32)
    exact = rotated(torch.from_numpy(f64(x)), torch.from_numpy(f64(table))).numpy()
    half = table.shape[2]
    size = np.abs(x)
    size[..., : 2 * half] = np.tile(size[..., :half] + size[..., half : 2 * half], 2) * np.abs(table).max(axis=(1, 2))[:, None, None]
    assert (np.abs(y - exact) <= size * 2.0**-23).all()
    assert np.array_equal(y[..., 2 * half :], x[..., 2 * half :])


# --- law L2: a row's bits depend on the row ---


def bits(result: tuple[Array, ...]) -> list[Array]:
    return [np.ascontiguousarray(part).reshape(len(part), -1).view(np.uint8) for part in result]


def assert_rows(found: tuple[Array, ...], wanted: tuple[Array, ...], rows: Any) -> None:
    for left, right in zip(bits(found), bits(wanted), strict=True):
        assert np.array_equal(left, right[rows])


@pytest.mark.parametrize("name", ROW_WISE)
def test_a_rows_bits_are_the_same_in_every_batch_and_at_every_index(machine: Machine, name: str) -> None:
    inputs, weights = inputs_of(ROW_WISE[name], 24, 11)
    together = run(machine, name, inputs, weights)
    for rows in COUNTS:
        for start in range(0, 24 - rows + 1, max(1, rows // 2)):
            part = np.arange(start, start + rows)
            assert_rows(run(machine, name, [pick(x, part) for x in inputs], weights), together, part)


@pytest.mark.parametrize("name", ROW_WISE)
@given(data=st.data())
@settings(max_examples=10)
def test_a_rows_bits_survive_any_order_and_any_cut_of_the_tasks(machine: Machine, name: str, data: st.DataObject) -> None:
    inputs, weights = inputs_of(ROW_WISE[name], 24, 12)
    order = data.draw(st.lists(st.integers(0, 23), min_size=1, max_size=24))
    cuts = data.draw(st.lists(st.floats(0, 1), max_size=3))

    def ranges(grid: int) -> list[tuple[int, int]]:
        points = sorted({0, grid, *(int(cut * grid) for cut in cuts)})
        return list(zip(points, points[1:], strict=False))[::-1]

    together = run(machine, name, inputs, weights)
    assert_rows(run(machine, name, [pick(x, order) for x in inputs], weights, ranges), together, order)


@pytest.mark.parametrize("name", ["residual", "bias and residual"])
def test_a_residual_may_be_overwritten_by_its_sum(machine: Machine, name: str) -> None:
    """plan_buffers places the result over the residual: the kernel must read before it writes."""
    inputs, weights = inputs_of(LINEARS[name], 17, 4)
    wanted = run(machine, name, inputs, weights)
    graph = GRAPHS[name]
    values = {f"in{i}": x for i, x in enumerate(inputs)} | {f"w{i}": x for i, x in enumerate(weights)}
    memory = machine.run(graph, values, counted(LIMITS, 17), over={"result": "in1"})["result"]
    assert_rows((get(memory, 17, inputs[1].shape[1]),), wanted, slice(None))
