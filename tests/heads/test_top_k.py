"""top_k on the CPU against the interpreter: the same indices, ties to the lowest, and rows that depend on themselves only (law L2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.interpret import interpret
from mlsdc.compiler.ops import Mismatch
from mlsdc.compiler.ops_heads import TopK
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.runtime.step import Limits
from tests.targets.cpu_machine import Machine, counted, get, one_by_one_backwards, whole

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=24, max_logit_rows=24, max_tree_nodes=7)
SIZES = ((64, 8), (272, 8), (50, 3), (8, 8))


def graph(n: int, k: int) -> Graph:
    b = Builder(f"top_{n}_{k}")
    return b.build(result=b.add("result", TopK(k), b.input("x", TensorType(DType.F32, (Dim("out", 1, 24), n)))))


GRAPHS = {size: graph(*size) for size in SIZES}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    torch.set_num_threads(1)
    return Machine.build(tmp_path_factory, "heads-top-k", LIMITS, GRAPHS.values())


def random(n: int, rows: int, seed: int = 0) -> npt.NDArray[Any]:
    """Few different values, so that there are ties."""
    return (np.random.default_rng(seed).integers(-40, 40, (rows, n)) / 4).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 8, 17])
def test_it_is_the_interpreters(machine: Machine, size: tuple[int, int], rows: int) -> None:
    n, k = size
    x = random(n, rows)
    found = get(machine.run(GRAPHS[size], {"x": x}, counted(LIMITS, rows, rows))["result"], rows, 2 * k + 1)
    wanted = interpret(GRAPHS[size], {"x": torch.from_numpy(x)}, lambda node: None)["result"]
    assert isinstance(wanted, torch.Tensor)
    assert np.array_equal(found[:, : 2 * k], wanted.numpy()[:, : 2 * k])
    assert np.allclose(found[:, 2 * k], wanted.numpy()[:, 2 * k], rtol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_a_row_is_the_same_alone_and_in_any_order(machine: Machine, size: tuple[int, int]) -> None:
    n, k = size
    x = random(n, 9, seed=1)
    together = get(machine.run(GRAPHS[size], {"x": x}, counted(LIMITS, 9, 9), ranges=whole)["result"], 9, 2 * k + 1)
    backwards = get(machine.run(GRAPHS[size], {"x": x}, counted(LIMITS, 9, 9), ranges=one_by_one_backwards)["result"], 9, 2 * k + 1)
    alone = get(machine.run(GRAPHS[size], {"x": x[4:5]}, counted(LIMITS, 1, 1))["result"], 1, 2 * k + 1)
    assert together.tobytes() == backwards.tobytes()
    assert together[4].tobytes() == alone[0].tobytes()


def test_a_k_that_does_not_fit_is_a_mismatch() -> None:
    with pytest.raises(Mismatch, match="cannot take the 9 largest"):
        TopK(9).infer(TensorType(DType.F32, (4, 8)))
