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
from mlsdc.compiler.ops_core import Binary, Unary
from mlsdc.compiler.ops_heads import TopK
from mlsdc.compiler.ops_nn import Gated, Linear, PadHeads
from mlsdc.compiler.ops_quant import GatedQuantise, LinearQ, Quantise
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


def linear(n: int, k: int, dtype: DType = DType.F8, bias: bool = False, rows: int = 64) -> Graph:
    b = Builder(f"linear_{dtype.value}_{n}_{k}")
    x = b.input("x", TensorType(DType.F32, (Dim("rows", 1, rows), k)))
    weight = b.weight("w", TensorType(dtype, (n, k)))
    more = (b.weight("b", TensorType(DType.F32, (n,))),) if bias else ()
    return b.build(result=b.add("result", Linear(), x, weight, *more))


def linears(dtype: DType, act: str = "silu") -> Graph:
    """A gated MLP of a quantised value with a residual: widths that no wide tile divides."""
    b = Builder(f"mlp_{dtype.value}")
    x = b.input("x", TensorType(DType.F32, (Dim("rows", 1, 160), 96)))
    gate, down = b.weight("gate_up", TensorType(dtype, (320, 96))), b.weight("down", TensorType(dtype, (96, 160)))
    bias = b.weight("b", TensorType(DType.F32, (96,)))
    gated = b.add("gated", GatedQuantise(act), b.add("h", Quantise(), x), gate)
    return b.build(result=b.add("result", LinearQ(bias=True, residual=True), gated, down, bias, x))


def gated(dtype: DType, act: str, fused: bool, n: int = 150) -> Graph:
    """A gated MLP over f32 rows as one node or as four. The halves' weights are those of the stacked one: see `halves`."""
    b = Builder(f"gated_{dtype.value}")
    x = b.input("x", TensorType(DType.F32, (Dim("rows", 1, 160), 96)))
    if fused:
        return b.build(result=b.add("result", Gated(act), x, b.weight("w", TensorType(dtype, (2 * n, 96)))))
    gate, up = (b.add(name, Linear(), x, b.weight(f"w.{name}", TensorType(dtype, (n, 96)))) for name in ("gate", "up"))
    return b.build(result=b.add("result", Binary("mul"), b.add("act", Unary(act), gate), up))


def check_gated(folder: Path) -> None:
    """One launch has the bits of four, with few rows and with many."""
    limits = Limits(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=160, max_logit_rows=24, max_tree_nodes=7)
    x = np.random.default_rng(9).standard_normal((160, 96)).astype(np.float32)
    for dtype, act in ((DType.BF16, "silu"), (DType.F8, "gelu_tanh"), (DType.Q4, "silu"), (DType.Q8, "gelu_tanh")):
        one, four = gated(dtype, act, True), gated(dtype, act, False)
        plain = random_weight(one["w"]).numpy()
        values = {"w": plain, "w.gate": plain[:150], "w.up": plain[150:]}
        given = {"x": x} | {name: QUANTISE[dtype](value) if dtype in QUANTISE else value for name, value in values.items()}
        machine = TritonMachine(limits, folder, exact=False)
        for rows in (ROWS, 130):
            buffers = StepBuffers(limits, 16)
            buffers.header[Header.ROWS] = rows
            found, wanted = (machine.run(graph, given, buffers)["result"].view(np.float32)[: rows * 150] for graph in (one, four))
            assert not np.isnan(found).any(), one.name
            assert np.array_equal(found, wanted), (one.name, rows)
            reference = interpret(one, {"x": torch.from_numpy(x[:rows])}, random_weight)["result"]
            np.testing.assert_allclose(found.reshape(rows, 150), reference, rtol=1e-4, atol=1e-4, err_msg=one.name)


def check_many_rows(folder: Path) -> None:
    """Tiles for many rows: integer dots have the bits of tiles for few, float dots those numbers nearly."""
    limits = Limits(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=160, max_logit_rows=24, max_tree_nodes=7)
    buffers = StepBuffers(limits, 16)
    x = np.random.default_rng(9).standard_normal((160, 96)).astype(np.float32)
    plain = [linear(150, 96, dtype, rows=160) for dtype in (DType.F32, DType.F8, DType.Q4)]
    for graph in (linears(DType.Q8), linears(DType.Q4), *plain):
        given = {"x": x}
        for node in graph:
            if isinstance(node.op, Weight):
                assert isinstance(node.type, TensorType)
                values = random_weight(node).numpy()
                given[node.name] = QUANTISE[node.type.dtype](values) if node.type.dtype in QUANTISE else values
        found = []
        for rows in (ROWS, 150):
            buffers.header[Header.ROWS] = rows
            result = TritonMachine(limits, folder, exact=False).run(graph, given, buffers)["result"].view(np.float32)
            found.append(result.reshape(-1, 96 if graph.name.startswith("mlp") else 150)[:rows])
        few, many = found
        assert np.isfinite(many).all(), graph.name
        if graph.name.startswith("mlp"):
            assert np.array_equal(many[:ROWS], few), graph.name
        else:
            np.testing.assert_allclose(many[:ROWS], few, rtol=1e-5, atol=1e-5, err_msg=graph.name)
        wanted = interpret(graph, {"x": torch.from_numpy(x[:150])}, random_weight)["result"]
        np.testing.assert_allclose(many, wanted, rtol=1e-4, atol=1e-4, err_msg=graph.name)


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
        for n, k, dtype in ((48, 64, DType.Q4), (37, 96, DType.Q4), (40, 96, DType.Q8)):  # 96: an odd number of groups
            check(machine, linear(n, k, dtype, bias=n == 37), {"x": np.random.default_rng(n).standard_normal((ROWS, k)).astype(np.float32)},
                  atol=4e-5)
        check_many_rows(Path(folder))
        check_gated(Path(folder))
        check(machine, pad(), {"x": np.random.default_rng(0).standard_normal((ROWS, 3, 24)).astype(np.float32)}, atol=0)
        for dtype in (DType.F32, DType.Q8, DType.Q4):
            check(machine, moe_graph(dtype), {"tokens": np.arange(ROWS, dtype=np.int32)})
    print("all as the reference interpreter has them")


if __name__ == "__main__":
    main()
