"""Mixtures of experts on NVIDIA GPUs: pairs sorted by expert have the bits of pairs alone, and their kernels stay in registers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlsdc.compiler.ops_moe import pairs_alone
from mlsdc.compiler.types import DType
from mlsdc.runtime.step import Limits
from mlsdc.targets.nvidia import NvidiaTarget
from mlsdc.targets.nvidia_build import VARIANTS
from mlsdc.targets.protocol import Call, Lowering
from mlsdc.targets.triton_build import Variant, compile_kernel, render, reproducible
from tests.targets.in_interpreter import interpreted
from tests.targets.interpret_experts import EXPERTS, SLOTS, expert_graph

pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")

SERVING = Limits(max_model_len=2048, max_num_seqs=4, max_num_batched_tokens=64, max_logit_rows=24, max_tree_nodes=7)


def calls(gpu: str, dtype: DType, exact: bool = True) -> tuple[Call, ...]:
    graph = expert_graph(dtype, False, False)
    lowered = NvidiaTarget(gpu, SERVING, exact).lower(graph["result"], graph)
    assert isinstance(lowered, Lowering)
    return lowered.calls


def test_pairs_sorted_by_expert_have_the_bits_of_pairs_alone(root: Path) -> None:
    assert "all as alone" in interpreted(root, "interpret_experts")


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 32, 33, 64])
@pytest.mark.parametrize("dtype", [DType.Q8, DType.F32])
def test_one_kind_of_kernel_runs_for_any_number_of_rows(dtype: DType, rows: int) -> None:
    from mlsdc.runtime.program import Launch

    chosen = [call for call in calls("h100", dtype) if Launch("", "", 1, "ROWS", (), 1, call.over, call.upto).runs(rows)]
    few = rows <= pairs_alone(EXPERTS, SLOTS)
    assert [call.spec.template.startswith("expert_plan") for call in chosen] == ([False] if few else [True, False])


@pytest.mark.parametrize(("gpu", "dtype", "exact"), [("h100", DType.Q8, True), ("a100", DType.Q4, True), ("l40s", DType.BF16, False),
                                                   ("a100", DType.F32, False)])
def test_kernels_of_sorted_pairs_stay_in_registers(tmp_path: Path, gpu: str, dtype: DType, exact: bool) -> None:
    specs = [call.spec for call in calls(gpu, dtype, exact)]
    built = NvidiaTarget(gpu, SERVING, exact).build(specs, tmp_path).kernels
    for spec in specs:
        used = built[spec.key].resources
        assert used["stack_bytes"] == 0
        if spec.template.startswith("expert_tiles"):
            assert (used["tensor_ops"] > 0) is (dtype is not DType.F32)  # f32: exact products
            assert used["async_copies"] > 0


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_sums_of_sorted_pairs_are_laid_out_as_those_of_a_pair_alone(tmp_path: Path, dtype: DType) -> None:
    """Lanes are summed in the order of their layout. With the same one and the same warps the same numbers have the same bits (law L2)."""
    assert {variant.num_warps for name in ("expert_linear", "expert_rows") for variant in VARIANTS[name]} == {4}
    alone, _, tiles = calls("h100", dtype)
    layouts = []
    target = NvidiaTarget("h100", SERVING)
    with reproducible(target.gpu):
        for spec in (alone.spec, tiles.spec):
            source = tmp_path / f"k_{spec.key}.py"
            source.write_text(render(spec))
            text = compile_kernel(spec.key, spec.abi, source, target.gpu.sm, Variant(4, 1)).asm["ttgir"]
            named = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<\{.*?\}>)", text, re.MULTILINE))
            layouts.append({named[name] for name in re.findall(r"\}\) : \(tensor<16x64xf32, (#\w+)>\)", text)})
    assert len(layouts[0]) == 1
    assert layouts[0] == layouts[1]
