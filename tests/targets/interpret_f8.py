"""Linears of e4m3 rows and weights through NvidiaTarget and Triton's interpreter, against the reference interpreter:
`python -m tests.targets.interpret_f8`. Raises AssertionError where they differ.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.interpret import interpret
from mlsdc.compiler.ops_quant import GatedF8, LinearF8
from mlsdc.compiler.quantise import quantise_f8
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.runtime.step import Header, Limits, StepBuffers
from mlsdc.targets.triton_build import render
from tests.targets.triton_machine import TritonMachine

LIMITS = Limits(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=160, max_logit_rows=24, max_tree_nodes=7)
FEW, MANY = 7, 130  # a tile that is not full; tiles for prompts


def linear(n: int, k: int, bias: bool, residual: bool) -> Graph:
    b = Builder(f"linear_f8_{n}_{k}")
    rows = Dim("rows", 1, 160)
    x, weight = b.input("x", TensorType(DType.F32, (rows, k))), b.weight("w", TensorType(DType.F8, (n, k)))
    more = [b.input("b", TensorType(DType.F32, (n,)))] if bias else []
    more += [b.input("r", TensorType(DType.F32, (rows, n)))] if residual else []
    return b.build(result=b.add("result", LinearF8(bias, residual), x, weight, *more))


def gated(n: int, k: int, act: str) -> Graph:
    b = Builder(f"gated_f8_{n}_{k}_{act}")
    x = b.input("x", TensorType(DType.F32, (Dim("rows", 1, 160), k)))
    return b.build(result=b.add("result", GatedF8(act), x, b.weight("w", TensorType(DType.F8, (2 * n, k)))))


def rows_of_all_sizes(k: int, seed: int) -> np.ndarray:
    """Rows whose numbers differ by 2^40, some with one number that leaves the others few bits, a row of zeros, one of denormals."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((160, k)).astype(np.float32) * np.exp2(rng.integers(-20, 21, (160, 1))).astype(np.float32)
    x[::3, rng.integers(k)] *= 300
    x[1], x[2] = 0, rng.integers(-3, 4, k) * np.float32(2**-149)
    return x


def check(machine: TritonMachine, graph: Graph, n: int, k: int) -> None:
    """With few rows and with many, by exact tiles and by wide ones; exact ones give a row the same bits whatever is beside it."""
    rng = np.random.default_rng(n + k)
    x, rows = rows_of_all_sizes(k, n), graph["w"].type.shape[0]  # type: ignore[union-attr]
    weight = quantise_f8(rng.standard_normal((rows, k)).astype(np.float32) * np.float32(k**-0.5))
    size = np.abs(x).max(-1, keepdims=True)
    values = {"x": x, "w": weight, "b": rng.standard_normal(n).astype(np.float32),
              "r": rng.standard_normal((160, n)).astype(np.float32) * size}
    found = {}
    for count in (FEW, MANY):
        buffers = StepBuffers(LIMITS, 16)
        buffers.header[Header.ROWS] = count
        found[count] = machine.run(graph, values, buffers)["result"].view(np.float32)[: count * n].reshape(count, n)
        given = {name: torch.from_numpy(value[:count] if name != "b" else value) for name, value in values.items() if name != "w"}
        wanted = interpret(graph, given, lambda node: weight)["result"]
        expected = np.asarray(wanted)
        scale = np.maximum(np.abs(expected).max(-1, keepdims=True), 1e-30)
        np.testing.assert_allclose(found[count] / scale, expected / scale, rtol=0, atol=4e-6, err_msg=f"{graph.name}, {count} rows")
    if machine.target.exact:
        assert np.array_equal(found[FEW], found[MANY][:FEW]), graph.name


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    with tempfile.TemporaryDirectory() as folder:
        for exact in (True, False):
            machine = TritonMachine(LIMITS, Path(folder), exact=exact)
            for n, k, bias, residual in ((37, 96, True, True), (48, 256, False, False), (40, 128, False, True)):
                check(machine, linear(n, k, bias, residual), n, k)
            for n, k, act in ((50, 96, "silu"), (32, 128, "gelu_tanh")):
                check(machine, gated(n, k, act), n, k)
        quantised(machine)
    print("all as the reference interpreter has them")


def quantised(machine: TritonMachine) -> None:
    """Codes and scales of rows longer than a block, bit for bit, codes at the ends of their range among them."""
    from mlsdc.targets.triton_interpreter import launch

    k = 4100
    graph = linear(16, k, False, False)
    call = machine.target.lower(graph["result"], graph).calls[0]  # type: ignore[union-attr]
    x = rows_of_all_sizes(k, 5)[:FEW]
    x[3] = np.linspace(-448, 448, k, dtype=np.float32)
    codes, scales = np.full(FEW * k, 0x7F, np.uint8), np.full(FEW, np.nan, np.float32)
    header = np.zeros(64, np.int32)
    header[Header.ROWS] = FEW
    path = machine.folder / "k_quantise.py"
    path.write_text(render(call.spec))
    launch(path, call.spec.key, FEW + 2, [x.reshape(-1), header, codes, scales])
    wanted = quantise_f8(x)
    assert np.array_equal(scales, wanted.scales)
    zero = (wanted.codes & 0x7F) == 0  # of either sign
    assert np.array_equal(np.where(zero, 0, codes.reshape(FEW, k) & np.where(zero, 0x7F, 0xFF)), np.where(zero, 0, wanted.codes))


if __name__ == "__main__":
    main()
