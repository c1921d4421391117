"""Ops of drafting levels and of mixtures of experts through NvidiaTarget and Triton's interpreter, against the reference interpreter:
`python -m tests.targets.interpret_ops`. Raises AssertionError where they differ.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlsdc.compiler.graph import Builder, Graph, Weight
from mlsdc.compiler.interpret import interpret
from mlsdc.compiler.ops_heads import TopK
from mlsdc.compiler.ops_nn import Linear, PadHeads
from mlsdc.compiler.quantise import quantise_f8, quantise_q4, quantise_q8
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.runtime.step import Header, Limits, StepBuffers
from tests.targets.test_cpu_moe import moe_graph, random_weight
from tests.targets.triton_machine import TritonMachine

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, max_logit_rows=24, max_tree_nodes=7)
ROWS = 7
QUANTISE = {DType.Q8: quantise_q8, DType.Q4: quantise_q4, DType.F8: quantise_f8}


def check(machine: TritonMachine, graph: Graph, values: dict[str, Any], *, atol: float = 5e-6) -> None:
    """Every result of the graph, over ROWS rows."""
    buffers = StepBuffers(LIMITS, 16)
    buffers.header[Header.ROWS] = buffers.header[Header.OUT] = ROWS
    given = dict(values)
    if "tokens" in values:
        buffers.tokens[:ROWS] = values["tokens"]
    for node in graph:
        if isinstance(node.op, Weight):
            assert isinstance(node.type, TensorType)
            plain = random_weight(node).numpy()
            given[node.name] = QUANTISE[node.type.dtype](plain) if node.type.dtype in QUANTISE else plain
    found = machine.run(graph, given, buffers)
    wanted = interpret(graph, {name: torch.from_numpy(np.asarray(x)) for name, x in values.items()}, random_weight)
    for result, value in graph.outputs:
        expected = np.asarray(wanted[result])
        dtype = np.int32 if expected.dtype.kind == "i" else np.float32
        mine = found[value][: expected.size * 4].view(dtype).reshape(expected.shape)
        np.testing.assert_allclose(mine, expected, rtol=2 * atol, atol=atol, err_msg=f"{graph.name}: {result}")


def top_k(n: int, k: int) -> Graph:
    b = Builder(f"top_{n}_{k}")
    return b.build(result=b.add("result", TopK(k), b.input("x", TensorType(DType.F32, (Dim("out", 1, 24), n)))))


def pad() -> Graph:
    b = Builder("pad")
    return b.build(result=b.add("result", PadHeads(5), b.input("x", TensorType(DType.F32, (Dim("rows", 1, 64), 3, 24)))))


def linear(n: int, k: int) -> Graph:
    b = Builder(f"linear_f8_{n}_{k}")
    x = b.input("x", TensorType(DType.F32, (Dim("rows", 1, 64), k)))
    weight = b.weight("w.f8", TensorType(DType.F8, (n, k)))
    return b.build(result=b.add("result", Linear(), x, weight))


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    with tempfile.TemporaryDirectory() as folder:
        machine = TritonMachine(LIMITS, Path(folder))
        for n, k in ((64, 8), (5000, 8), (50, 3), (8, 8)):
            x = (np.random.default_rng(n).integers(-40, 40, (ROWS, n)) / 4).astype(np.float32)  # few different values: ties
            check(machine, top_k(n, k), {"x": x})
        for n, k in ((48, 64), (37, 96)):
            check(machine, linear(n, k), {"x": np.random.default_rng(n).standard_normal((ROWS, k)).astype(np.float32)},
                  atol=4e-5)  # x is multiplied with 16 bits of mantissa
        check(machine, pad(), {"x": np.random.default_rng(0).standard_normal((ROWS, 3, 24)).astype(np.float32)}, atol=0)
        for dtype in (DType.F32, DType.Q8, DType.Q4):
            check(machine, moe_graph(dtype), {"tokens": np.arange(ROWS, dtype=np.int32)})
    print("all as the reference interpreter has them")


if __name__ == "__main__":
    main()
