"""Pairs (row, slot) sorted by expert, against pairs alone, bit for bit: `python -m tests.targets.interpret_experts`. Raises AssertionError
where they differ.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlsdc.compiler.graph import Builder, Graph, Weight
from mlsdc.compiler.interpret import interpret
from mlsdc.compiler.ops_core import Reshape
from mlsdc.compiler.ops_moe import ExpertLinear, ExpertLinearQ, pairs_alone
from mlsdc.compiler.ops_quant import Quantise
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.runtime.step import Header, Limits, StepBuffers
from mlsdc.targets.protocol import Lowering
from tests.targets.interpret_ops import QUANTISE
from tests.targets.test_cpu_moe import random_weight
from tests.targets.triton_machine import TritonMachine

EXPERTS, SLOTS, K, N = 5, 2, 96, 48
LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, max_logit_rows=24, max_tree_nodes=7)
ROWS = Dim("rows", 1, LIMITS.max_num_batched_tokens)
EXACT = ((DType.Q8, True), (DType.Q4, False), (DType.F32, False), (DType.BF16, True))  # and whether each slot has a row of its own


def expert_graph(dtype: DType, slots_apart: bool, bias: bool, fine: tuple[int, ...] = ()) -> Graph:
    """One expert linear whose slots see one row, or (`slots_apart`) each its own."""
    b = Builder(f"{dtype.value}{'_apart' if slots_apart else ''}{'_fine' if fine else ''}")
    own = SLOTS if slots_apart else 1
    x = b.input("x", TensorType(DType.F32, (ROWS, own * K)))
    index = b.input("index", TensorType(DType.I32, (ROWS, SLOTS)))
    weight = b.weight("w", TensorType(dtype, (EXPERTS * N, K)))
    more = (b.weight("b", TensorType(DType.F32, (EXPERTS, N))),) if bias else ()
    if dtype in QUANTISE:
        h = b.add("h", Quantise(fine), x)
        return b.build(result=b.add("result", ExpertLinearQ(EXPERTS, own, bias), h, weight, index, *more))
    apart = b.add("apart", Reshape((-1, own, K)), x)
    return b.build(result=b.add("result", ExpertLinear(EXPERTS), apart, weight, index, *more))


def packed(graph: Graph) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in graph:
        if isinstance(node.op, Weight):
            assert isinstance(node.type, TensorType)
            plain = random_weight(node).numpy()
            found[node.name] = QUANTISE[node.type.dtype](plain) if node.type.dtype in QUANTISE else plain
    return found


def rows_of(machine: TritonMachine, graph: Graph, x: Any, index: Any, rows: int, backwards: bool = False) -> Any:
    buffers = StepBuffers(LIMITS, 16)
    buffers.header[Header.ROWS] = rows
    order = (lambda n: [(i, i + 1) for i in range(n)]) if backwards else None
    found = machine.run(graph, {"x": x, "index": index} | packed(graph), buffers, ranges=order)["result"]
    return found.view(np.float32)[: rows * SLOTS * N].reshape(rows, SLOTS, N)


def launched(machine: TritonMachine, graph: Graph, rows: int) -> list[str]:
    lowered = machine.target.lower(graph["result"], graph)
    assert isinstance(lowered, Lowering)
    buffers = StepBuffers(LIMITS, 16)
    buffers.header[Header.ROWS] = rows
    return [f"{call.spec.template}{getattr(call.spec.params, 'block_m', '')}" for call in lowered.calls if machine.programs(call, buffers)]


def check(graph: Graph, folder: Path, *, exact: bool, atol: float) -> None:
    machine, alone = (TritonMachine(LIMITS, folder, exact=exact) for _ in range(2))
    alone.target.gpu = replace(alone.target.gpu, multiprocessors=0)
    own = SLOTS if "apart" in graph.name else 1
    random = np.random.default_rng(5)
    x = random.standard_normal((LIMITS.max_num_batched_tokens, own * K)).astype(np.float32)
    index = np.stack([random.permutation(EXPERTS - 1)[:SLOTS] for _ in range(len(x))]).astype(np.int32)  # nobody chooses the last one
    index[:4] = 0  # both slots of some rows, so that an expert has more pairs than a tile
    for rows in (pairs_alone(EXPERTS, SLOTS), 7, 50):
        names = launched(machine, graph, rows)
        assert ("expert_plan" in names) == (rows > pairs_alone(EXPERTS, SLOTS)), names
        found, wanted = rows_of(machine, graph, x, index, rows), rows_of(alone, graph, x, index, rows)
        assert not np.isnan(found).any(), (graph.name, rows)
        if rows == 7:
            assert np.array_equal(found, rows_of(machine, graph, x, index, rows, backwards=True)), graph.name
        if atol == 0.0:
            assert np.array_equal(found, wanted), (graph.name, rows, names)
        else:
            np.testing.assert_allclose(found, wanted, rtol=atol, atol=atol, err_msg=f"{graph.name} {rows}")
        inputs = {"x": torch.from_numpy(x[:rows]), "index": torch.from_numpy(index[:rows])}
        reference = interpret(graph, inputs, random_weight)["result"]
        np.testing.assert_allclose(found, reference, rtol=1e-4, atol=1e-4, err_msg=f"{graph.name} {rows}")
        print(graph.name, rows, *names)


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for dtype, apart in EXACT:
            check(expert_graph(dtype, apart, bias=apart), folder, exact=True, atol=0.0)
        check(expert_graph(DType.Q4, False, True, (1,)), folder, exact=True, atol=0.0)
        for dtype in (DType.F32, DType.BF16):
            check(expert_graph(dtype, False, True), folder, exact=False, atol=2e-5)
    print("all as alone")


if __name__ == "__main__":
    main()
