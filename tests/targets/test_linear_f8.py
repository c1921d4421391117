"""Weights and rows of e4m3 (`weights: fp8-a8`): passes, the CPU, Triton's interpreter, machine code. Nothing here ran on a card."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.interpret import interpret
from mlsdc.compiler.ops_quant import GatedF8, LinearF8
from mlsdc.compiler.quantise import quantise_f8
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.passes.emit_program import emit_program
from mlsdc.runtime.step import Limits
from mlsdc.targets import make_target
from mlsdc.targets.nvidia_values import bearers
from mlsdc.targets.protocol import Declined, KernelSpec
from mlsdc.templates.params_triton_f8 import step
from tests.passes.graphs import Llama, Weights, row_program
from tests.passes.steps import apply, assert_same, before, compiled, ops, relative_error, results
from tests.targets.cpu_level import loaded
from tests.targets.in_interpreter import interpreted
from tests.targets.test_cpu_plain import LIMITS as CPU_LIMITS
from tests.targets.test_cpu_plain import two_steps, two_steps_interpreted

LIMITS = Limits(max_model_len=8192, max_num_seqs=16, max_num_batched_tokens=512, max_logit_rows=64, max_tree_nodes=31)


def linear(n: int, k: int) -> Graph:
    b = Builder("linear")
    rows = Dim("rows", 1, 512)
    x, r = b.input("x", TensorType(DType.F32, (rows, k))), b.input("r", TensorType(DType.F32, (rows, n)))
    return b.build(y=b.add("y", LinearF8(residual=True), x, b.weight("w", TensorType(DType.F8, (n, k))), r))


def gated(n: int, k: int) -> Graph:
    b = Builder("gated")
    x = b.input("x", TensorType(DType.F32, (Dim("rows", 1, 512), k)))
    return b.build(y=b.add("y", GatedF8(), x, b.weight("w", TensorType(DType.F8, (2 * n, k)))))


def kernels(graph: Graph, gpu: str, exact: bool = False) -> list[KernelSpec]:
    lowering = make_target(gpu, LIMITS, exact).lower(graph["y"], graph)
    assert not isinstance(lowering, Declined)
    return [call.spec for call in lowering.calls]


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 64)).astype(np.float32)
    weight = quantise_f8(rng.standard_normal((16, 64)).astype(np.float32))
    values = {"x": x, "r": np.zeros((4, 16), np.float32)}
    found = []
    for rows, larger in ((1, 1), (4, 1000)):  # times the rows behind the first
        given = values | {"x": x * np.array([[1], [larger], [larger], [larger]], np.float32)}
        inputs = {name: torch.from_numpy(value[:rows]) for name, value in given.items()}
        found.append(np.asarray(interpret(linear(16, 64), inputs, lambda node: weight)["y"])[0])
    np.testing.assert_allclose(*found, rtol=1e-6, atol=1e-6)


def test_rows_and_weights_are_rounded_to_e4m3_by_its_definition() -> None:
    """Against a reading of the format of its own: 448 / max|x| of a row, torch's cast."""
    rng = np.random.default_rng(1)
    x, w = (torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in ((5, 96), (32, 96)))

    def rounded(values: torch.Tensor) -> torch.Tensor:
        scale = values.abs().amax(-1, keepdim=True) / 448
        return (values / scale).to(torch.float8_e4m3fn).to(torch.float64) * scale

    found = interpret(linear(32, 96), {"x": x, "r": torch.zeros(5, 32)}, lambda node: w)["y"]
    np.testing.assert_allclose(np.asarray(found), rounded(x) @ rounded(w).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biases", [False, True])
def test_every_linear_of_a_layer_gets_rows_of_e4m3_and_the_head_does_not(biases: bool) -> None:
    found = ops(compiled(Llama(layers=2, biases=biases), weights="fp8-a8"))
    assert (found["linear_f8"], found["gated_f8"], found["linear"]) == (6, 2, 1)  # qkv, out, down; gate and up; the head
    assert not found["binary"]  # residuals are added by the linears


@pytest.mark.parametrize("name", ["fuse-qkv", "fuse-gate-up", "fuse-residual"])
def test_fusions_change_no_result(name: str) -> None:
    graph, pass_ = before(name, shape := Llama(), weights="fp8-a8")
    after = apply(graph, pass_)
    assert after != graph
    assert_same(results(graph, shape), results(after, shape))


@pytest.mark.parametrize("shape", [Llama(), Llama(mlp=100, biases=True, act="gelu_tanh", vocab=93)], ids=["llama", "biases, odd sizes"])
def test_a_cpu_gives_the_logits_of_the_interpreter(shape: Llama, tmp_path: Path) -> None:
    graph, weights = compiled(shape, weights="fp8-a8"), Weights(row_program(shape))
    with loaded({"f8": graph}, weights, tmp_path, CPU_LIMITS) as level:
        found = torch.from_numpy(two_steps(level, "f8"))
    wanted = torch.from_numpy(two_steps_interpreted(graph, weights))
    plain = torch.from_numpy(two_steps_interpreted(compiled(shape, weights="none"), weights))
    assert relative_error(found, wanted) < 0.2 * relative_error(wanted, plain)  # some numbers near a tie round the other way


def test_kernels_give_what_the_reference_interpreter_gives(root: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    assert "all as the reference interpreter has them" in interpreted(root, "interpret_f8")


@pytest.mark.parametrize("rows", [1, 7])
def test_what_multiplies_bears_a_node_s_bytes_and_not_what_quantises_rows(rows: int) -> None:
    graph = compiled(Llama(), weights="fp8-a8")
    program, _ = emit_program(graph, make_target("h100", LIMITS, False), "forward", "target")
    bearer = bearers(launch for launch in program.launches if launch.count != "ROWS" or launch.runs(rows))
    f8 = [node for node in graph.nodes if isinstance(node.op, LinearF8 | GatedF8)]
    assert f8
    assert all(bearer[node.name].startswith(node.op.opname) for node in f8)


@pytest.mark.parametrize(("gpu", "wide", "few"), [("l40s", "QMMA", "QMMA"), ("h100", "QGMMA", "HMMA"), ("b200", "UTCQMMA", "HMMA")])
def test_machine_code_multiplies_e4m3_without_spills(gpu: str, wide: str, few: str, tmp_path: Path) -> None:
    """On Hopper only a warp group multiplies e4m3, on Blackwell only what works in tensor memory, tiles of 64 rows; tiles of 16 become f16
    in registers, exactly."""
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    from mlsdc.targets import cubin
    from mlsdc.targets.triton_build import tools_folder

    chosen = kernels(linear(576, 576), gpu)
    info = make_target(gpu, LIMITS).build(chosen, tmp_path)
    for key, kernel in info.kernels.items():
        assert kernel.resources["stack_bytes"] == 0
        found: Counter[str] = cubin.sass(tmp_path / kernel.file, tools_folder())
        dots = {name: count for name, count in found.items() if "MMA" in name}
        assert bool(dots) == key.startswith("linear_f8")
        if dots:
            wanted = wide if "_m64" in key else few
            assert all(wanted in name for name in dots), dots
            assert 2 <= sum(dots.values()) <= 128, dots
            added = sum(count for name, count in found.items() if name.startswith("FADD"))  # Blackwell has FADD2, of two numbers
            assert added >= 8, "sums of e4m3 products are added in f32"


@pytest.mark.parametrize(("gpu", "sm"), [("a100", "sm_80"), ("a10", "sm_86"), ("mi300x", "gfx942")])
@pytest.mark.parametrize("graph", [linear(64, 64), gated(64, 64)], ids=["linear", "gated"])
def test_hardware_that_cannot_multiply_e4m3_is_declined_by_name(gpu: str, sm: str, graph: Graph) -> None:
    declined = make_target(gpu, LIMITS).lower(graph["y"], graph)
    assert isinstance(declined, Declined)
    for word in (sm, "sm_89", "weights: fp8", "e4m3"):
        assert word in declined.why


def test_exact_rows_keep_to_one_kind_of_tile() -> None:
    for graph in (linear(576, 576), gated(576, 576)):
        assert [spec.template for spec in kernels(graph, "h100", exact=True)] == ["quantise_f8", graph["y"].op.opname]
        assert [spec.params.block_m for spec in kernels(graph, "h100")[1:]] == [16, 64]  # type: ignore[attr-defined]


@pytest.mark.parametrize("k", [576, 4096, 14336, 100])
def test_no_more_than_128_products_are_summed_before_f32_takes_the_sum(k: int) -> None:
    assert step(k) <= 128


def test_a_layer_takes_four_launches_that_quantise_and_two_fewer_that_add() -> None:
    def launches(layers: int) -> int:
        graph = compiled(Llama(layers=layers), weights="fp8-a8")
        program, _ = emit_program(graph, make_target("h100", CPU_LIMITS), "forward", "target")
        return sum(launch.count is None or launch.runs(1) for launch in program.launches)

    assert launches(2) - launches(1) == 14
