"""Launches of a layer on NVIDIA GPUs: what the fusion passes leave, for every kind of weights."""

from __future__ import annotations

import pytest

from mlsdc.passes.emit_program import emit_program
from mlsdc.runtime.step import Limits
from mlsdc.targets.nvidia import NvidiaTarget
from tests.passes.graphs import Llama
from tests.passes.steps import compiled

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, max_logit_rows=64, max_tree_nodes=15)
QUANTISED, PLAIN = ("int8", "int4"), ("int4-a16", "fp8", "bf16")


def launches(weights: str, layers: int, disable: tuple[str, ...] = ()) -> int:
    graph = compiled(Llama(layers=layers), weights=weights, disable=disable)
    program, _ = emit_program(graph, NvidiaTarget("h100", LIMITS), "forward", "target")
    return sum(launch.count is None or launch.runs(1) for launch in program.launches)


@pytest.mark.parametrize(("weights", "wanted"), [(name, 10) for name in QUANTISED] + [(name, 12) for name in PLAIN])
def test_a_layer_takes_one_launch_for_qkv_and_one_for_the_gated_half_of_its_mlp(weights: str, wanted: int) -> None:
    """f32 rows take two more: additions of the residual stream are launches of their own."""
    assert launches(weights, 2) - launches(weights, 1) == wanted


@pytest.mark.parametrize("weights", PLAIN)
def test_without_the_two_fusions_a_layer_takes_six_launches_more(weights: str) -> None:
    without = ("fuse-qkv", "fuse-gate-up")
    assert launches(weights, 2, without) - launches(weights, 1, without) == 18
