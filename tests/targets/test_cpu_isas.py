"""Every kind of CPU kernel on every ISA that runs here, aarch64 under qemu: facts of test_cpu_kernels, _lookups and _attention."""

from __future__ import annotations

import platform

import numpy as np
import pytest

import tests.targets.test_cpu_attention as attention
import tests.targets.test_cpu_kernels as kernels
import tests.targets.test_cpu_lookups as lookups
from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.interpret_core import UNARY
from mlsdc.compiler.ops_core import Unary
from mlsdc.runtime.step import aligned
from mlsdc.targets.cpu_build import ENTRY
from mlsdc.targets.cpu_isa import ISAS, CpuIsa
from tests.targets.cpu_machine import Machine, counted, get
from tests.targets.qemu_machine import QemuMachine

OTHERS = [isa for isa in ISAS.values() if isa.name != "cpu-x86-64-v4"]
PLAIN = ("bf16 bias", "bf16 of few rows", "f8 bias", "f8 of few rows")
LINEARS, GATED = ("linear that pads", "bias and residual", "q4 that pads", "q4 bias and residual"), ("silu", "q4 silu")
QUANTISERS, ROPES = ("quantise", "norm that pads"), ("rope slice",)
ROW_WISE = (*LINEARS, *PLAIN, *GATED, *QUANTISERS, *ROPES)
TABLES = ("embed 8.0", "embed bf16 8.0", "table 32", "argmax 1008 1000", "gather")
UNARIES = ("exp", "gelu", "tanh")


def unary_graph(fn: str) -> Graph:
    b = Builder(f"unary {fn}")
    return b.build(result=b.add("result", Unary(fn), b.input("in0", kernels.f32(kernels.ROWS, 96))))


def build(factory: pytest.TempPathFactory, isa: CpuIsa) -> dict[str, Machine]:
    """Machines over test_cpu_kernels' and test_cpu_attention's limits."""
    graphs = [*(kernels.GRAPHS[name] for name in ROW_WISE), *(lookups.GRAPHS[name] for name in TABLES)]
    graphs += [unary_graph(fn) for fn in UNARIES]
    attends = [attention.GRAPHS[name] for name in ("smollm2", "smollm2 a8", "narrow slice")]
    make = Machine.build if isa.arch == platform.machine().lower() else QemuMachine.build
    return {
        "kernels": make(factory, f"{isa.name}-kernels", kernels.LIMITS, graphs, isa),
        "attention": make(factory, f"{isa.name}-attention", attention.LIMITS, attends, isa),
    }


@pytest.fixture(scope="module", params=OTHERS, ids=lambda isa: str(isa.name))
def machines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Machine]:
    return build(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def machine(machines: dict[str, Machine]) -> Machine:
    return machines["kernels"]


@pytest.mark.parametrize("rows", [1, 7, 17])
@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_is_within_its_rounding_of_float64(machine: Machine, name: str, rows: int) -> None:
    kernels.test_a_linear_is_within_its_rounding_of_float64(machine, name, rows)


def test_the_largest_codes_of_both_signs_do_not_overflow(machine: Machine) -> None:
    """Weights of -128 and activations of -127: the largest sums that 16-bit steps of a dot product see."""
    name = "linear that pads"
    (x,), (w,) = kernels.inputs_of(kernels.LINEARS[name], 3, 0)
    x.codes[:], x.scales[:] = 127, 1
    x.codes[1] *= -1
    for code in (-128, 127):
        w.codes[:], w.scales[:] = code, 1
        (y,) = kernels.run(machine, name, [x], [w])
        assert np.array_equal(y, np.float32(x.codes.astype(int) @ w.codes.astype(int).T))


@pytest.mark.parametrize("name", PLAIN)
def test_a_linear_over_bf16_or_f8_weights_is_within_its_rounding_of_float64(machine: Machine, name: str) -> None:
    kernels.test_a_linear_over_bf16_or_f8_weights_is_within_its_rounding_of_float64(machine, name, 17)


@pytest.mark.parametrize("name", GATED)
def test_a_gated_row_is_the_nearest_code_of_float64(machine: Machine, name: str) -> None:
    kernels.test_a_gated_row_is_the_nearest_code_of_float64(machine, name, 17)


@pytest.mark.parametrize("name", QUANTISERS)
def test_a_quantised_row_is_the_nearest_code_of_float64(machine: Machine, name: str) -> None:
    kernels.test_a_quantised_row_is_the_nearest_code_of_float64(machine, name, 17)


@pytest.mark.parametrize("name", ROPES)
def test_rope_is_the_rotation_rounded_twice(machine: Machine, name: str) -> None:
    kernels.test_rope_is_the_rotation_rounded_twice(machine, name)


def test_tables_are_read_and_made_as_on_any_machine(machine: Machine) -> None:
    lookups.test_embedding_rows_are_the_tables_dequantised(machine, 8.0)
    lookups.test_embedding_rows_are_the_bf16_tables(machine, 8.0)
    lookups.test_rope_angles_are_right_up_to_long_contexts(machine, 32, 1.0)
    lookups.test_gathered_rows_are_copies(machine)
    lookups.test_argmax_of_rows_that_are_not_numbers_is_an_id(machine, 1008, 1000)


@pytest.mark.parametrize("fn", UNARIES)
def test_polynomials_are_within_rounding_of_float64(machine: Machine, fn: str) -> None:
    import torch

    x = np.random.default_rng(0).uniform(-20, 20, (3, 96)).astype(np.float32)
    found = get(machine.run(unary_graph(fn), {"in0": x}, counted(kernels.LIMITS, 3))["result"], 3, 96)
    wanted = UNARY[fn](torch.from_numpy(x.astype(np.float64))).numpy()
    assert np.allclose(found, wanted, rtol=1e-6, atol=3e-7)


@pytest.mark.parametrize("name", ROW_WISE)
def test_a_rows_bits_are_the_same_in_every_batch(machine: Machine, name: str) -> None:
    inputs, weights = kernels.inputs_of(kernels.ROW_WISE[name], 9, 11)
    together = kernels.run(machine, name, inputs, weights)
    for rows in range(1, 9):
        part = np.arange(9 - rows, 9)
        kernels.assert_rows(kernels.run(machine, name, [kernels.pick(x, part) for x in inputs], weights), together, part)


def test_attention_is_float64s(machines: dict[str, Machine]) -> None:
    attention.test_attention_of_mixed_batches_is_float64s(machines["attention"], "smollm2", 1)
    attention.test_quantised_attention_has_the_codes_of_its_float_result(machines["attention"], "smollm2")


def test_a_sequences_attention_bits_survive_neighbours_and_placement(machines: dict[str, Machine]) -> None:
    machine, shape = machines["attention"], attention.SHAPES["smollm2"]
    batch = attention.random_batch(np.random.default_rng(3), shape, limits=attention.LIMITS)
    case = attention.lay(shape, batch)
    together = attention.rows_of(case, attention.attend(machine, "smollm2", case))
    for i, sequence in enumerate(batch):
        assert np.array_equal(attention.attend(machine, "smollm2", attention.lay(shape, [sequence], i + 1)), together[i])


def test_the_walker_of_aarch64_wakes_by_its_own_system_call(machines: dict[str, Machine]) -> None:
    machine = machines["attention"]
    if not isinstance(machine, QemuMachine):
        pytest.skip("the engine's tests run the walker of this machine")
    pool = aligned((64,), "i8")
    assert machine.execute(ENTRY + "mlsdc_stop", [pool]) == (0, 98)
    assert (pool[40], pool[24]) == (1, 1)  # stop, wake counter
