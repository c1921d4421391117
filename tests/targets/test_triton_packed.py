"""Attention over packed caches, compiled ahead of time for one kernel an architecture: a build refuses what spills or does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.runtime.step import Limits
from mlsdc.targets.nvidia import NvidiaTarget
from tests.targets.attention_vectors import Shape
from tests.targets.interpret_attention import attention_graph, lowered

pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")

SERVING = Limits(max_model_len=8192, max_num_seqs=16, max_num_batched_tokens=512, max_logit_rows=64, max_tree_nodes=31)
CHOICES = [("a100", "int8", True), ("l40s", "int4-token", True), ("h100", "int4", False), ("rtx5090", "fp8", True)]


@pytest.mark.parametrize(("gpu", "format", "exact"), CHOICES)
def test_attention_over_a_packed_cache_stays_in_registers(tmp_path: Path, gpu: str, format: str, exact: bool) -> None:
    graph = attention_graph(Shape(9, 3, 64, page_size=32, num_layers=30, layer=29, format=format), SERVING)
    (spec,) = [call.spec for call in lowered(graph, SERVING, gpu, exact).calls if call.spec.template == "attend_split"]
    used = NvidiaTarget(gpu, SERVING, exact).build([spec], tmp_path).kernels[spec.key].resources
    assert used["stack_bytes"] == 0
    assert used["tensor_ops"] > 0
    assert used["async_copies"] > 0
