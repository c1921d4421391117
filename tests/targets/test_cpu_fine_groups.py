"""a16 on the CPU: groups with a second int8 plane, from the norm that writes them to the linears that read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.interpret import interpret
from mlsdc.compiler.ops_quant import GatedQuantise, LinearQ, NormQuantise, Quantise
from mlsdc.compiler.quantise import quantise_q8
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.runtime.step import Limits
from tests.targets.cpu_machine import Machine, counted, get, get_a8

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=24, max_logit_rows=24, max_tree_nodes=7)
ROWS = Dim("rows", 1, 24)
FINE = {1: (5,), 2: (0, 3), 3: (6, 1, 2), 4: (1, 2, 3, 6)}
K, N = 224, 48  # seven groups: the eighth is padding, the second planes come behind it


def linear_graph(fine: tuple[int, ...], norm: bool = True) -> Graph:
    b = Builder(f"fine {len(fine)} {norm}")
    x, w = b.input("in0", TensorType(DType.F32, (ROWS, K))), b.weight("w0", TensorType(DType.Q8, (N, K)))
    if norm:
        h = b.add("h", NormQuantise(1e-5, fine=fine), x, b.weight("w1", TensorType(DType.F32, (K,))))
    else:
        h = b.add("h", Quantise(fine), x)
    return b.build(result=b.add("result", LinearQ(), h, w))


def gated_graph() -> Graph:
    b = Builder("fine gated")
    x, w = b.input("in0", TensorType(DType.F32, (ROWS, K))), b.weight("w0", TensorType(DType.Q8, (128, K)))
    h = b.add("h", NormQuantise(1e-5, fine=(0, 3)), x, b.weight("w1", TensorType(DType.F32, (K,))))
    return b.build(result=b.add("result", GatedQuantise(), h, w))


GRAPHS = {**{f"{n}": linear_graph(fine) for n, fine in FINE.items()}, "plain": linear_graph((2, 4), norm=False), "gated": gated_graph()}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine.build(tmp_path_factory, "cpu-fine-groups", LIMITS, GRAPHS.values())


def values(rows: int, n: int = N) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, K), np.float32)
    x[:, 100] *= 60  # an outlier channel
    x[0, 64:96] = 0
    w = quantise_q8(rng.standard_normal((n, K), np.float32) / 8)
    return {"in0": x, "w0": w, "w1": (1 + rng.random(K) / 4).astype(np.float32)}


def run(machine: Machine, name: str, given: dict[str, Any]) -> Any:
    rows = len(given["in0"])
    memory = machine.run(GRAPHS[name], given, counted(LIMITS, rows))["result"]
    if name == "gated":
        return get_a8(memory, GRAPHS[name]["result"].type, rows)[0]  # type: ignore[arg-type]
    return get(memory, rows, N)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 17])
@pytest.mark.parametrize("name", [*map(str, FINE), "plain"])
def test_second_planes_give_what_their_definition_gives(machine: Machine, name: str, rows: int) -> None:
    given = values(rows)
    wanted = np.asarray(interpret(GRAPHS[name], given, lambda node: given[node.name])["result"])
    found = run(machine, name, given)
    # one code of the first plane may round the other way where the norm's sum differs in its last bit; the second plane takes that up
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4 * float(np.abs(wanted).max()))


def test_gated_rows_read_second_planes(machine: Machine) -> None:
    given = values(9, 128)
    wanted = interpret(GRAPHS["gated"], given, lambda node: given[node.name])["result"]
    found = run(machine, "gated", given)
    assert np.abs(found.codes.astype(int) - wanted.codes).max() <= 1
    np.testing.assert_allclose(found.scales, wanted.scales, rtol=1e-4)


@pytest.mark.parametrize("name", [*map(str, FINE), "plain"])
def test_a_row_with_second_planes_has_the_same_bits_in_any_batch(machine: Machine, name: str) -> None:
    given = values(17)
    whole = run(machine, name, given)
    for rows in range(1, 10):
        some = given | {"in0": given["in0"][17 - rows :]}
        assert np.array_equal(run(machine, name, some).view(np.uint32), whole[17 - rows :].view(np.uint32))


def test_second_planes_take_most_of_the_rounding_error_away(machine: Machine) -> None:
    given = values(16)
    rms = np.sqrt((given["in0"].astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    exact = (given["in0"] / rms * given["w1"]) @ given["w0"].dequantise().astype(np.float64).T
    with_outlier = np.abs(run(machine, "2", given) - exact).mean()  # channel 100 lies in group 3, which has a second plane
    without = np.abs(run(machine, "1", given) - exact).mean()
    assert with_outlier < without / 3


def test_fine_groups_must_be_groups_of_the_value() -> None:
    from mlsdc.compiler.errors import IrError

    for fine in ((7,), (-1,), (1, 1)):
        with pytest.raises(IrError, match="fine groups"):
            linear_graph(fine)
