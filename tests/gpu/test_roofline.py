"""The roofline model: bytes and operations of known shapes, and what the verb prints. No times are asserted, they are predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlsdc.compiler.cli import main
from mlsdc.compiler.cli_roofline import chain_tokens
from mlsdc.compiler.graph import Builder, Weight
from mlsdc.compiler.ops_moe import ExpertLinearQ
from mlsdc.compiler.roofline import KV_BITS, MACHINES, Load, step_costs, step_seconds, weight_bytes
from mlsdc.compiler.roofline_shapes import SHAPES, shape_graph
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.runtime.step import Limits
from mlsdc.targets.hardware import GPUS

LIMITS = Limits(max_model_len=32768, max_num_seqs=64, max_num_batched_tokens=512, max_logit_rows=512, max_tree_nodes=15)
H100 = MACHINES["h100"]


@pytest.mark.parametrize(("name", "billions"), [("llama-3-8b", 8.03), ("llama-3-70b", 70.55), ("smollm2-135m", 0.1345)])
def test_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    graph = shape_graph(SHAPES[name], LIMITS, "bf16")
    matrices = sum(weight_bytes(node.type) for node in graph if isinstance(node.op, Weight) and str(node.type).startswith("bf16")) / 2
    assert matrices / 1e9 == pytest.approx(billions, rel=0.002)


def test_a_step_of_one_row_reads_every_weight_but_the_embedding_once() -> None:
    graph = shape_graph(SHAPES["llama-3-8b"], LIMITS, "bf16")
    stored = sum(weight_bytes(node.type) for node in graph if isinstance(node.op, Weight))
    embedding = weight_bytes(graph["w.embed"].type)
    assert sum(cost.weights for cost in step_costs(graph, Load(1, 1, 0))) == pytest.approx(stored - embedding, rel=1e-4)


def test_operations_of_a_row_are_twice_its_weights() -> None:
    graph = shape_graph(SHAPES["llama-3-8b"], LIMITS, "bf16")
    operations = sum(cost.operations for cost in step_costs(graph, Load(1, 1, 0)))
    assert operations / 2 == pytest.approx(8.03e9 - 128256 * 4096, rel=0.002)


@pytest.mark.parametrize(("weights", "unit", "terms"), [("bf16", "bf16", 2), ("fp8", "bf16", 2), ("int4", "int8", 1), ("int8", "int8", 1)])
def test_a_linear_runs_on_what_its_rows_are(weights: str, unit: str, terms: int) -> None:
    """fp8 weights become bf16, and rows of f32 two terms of that: e4m3 units are for rows that are e4m3."""
    graph = shape_graph(SHAPES["llama-3-8b"], LIMITS, weights)
    layers = [cost for cost in step_costs(graph, Load(512, 1, 512)) if cost.weights > 1e6 and "layers" in cost.node]
    assert len(layers) >= 32 * 4
    assert {(cost.unit, cost.terms) for cost in layers} == {(unit, terms)}


def test_the_cache_is_read_once_for_all_rows_of_a_sequence() -> None:
    graph = shape_graph(SHAPES["llama-3-8b"], LIMITS)
    read = [sum(cost.kv for cost in step_costs(graph, Load(rows, 4, 8192)) if cost.op == "paged_attention") for rows in (4, 32)]
    assert read[0] == read[1] == 4 * 8192 * 32 * 8 * 128 * 2 * 2


@pytest.mark.parametrize(("rows", "experts", "launches"), [(1, 2, 1), (4, 8, 1), (5, 8, 2), (512, 8, 2)])
def test_experts_that_are_hit_are_read_once(rows: int, experts: int, launches: int) -> None:
    b = Builder("moe")
    x = b.input("x", TensorType(DType.A8, (Dim("rows", 1, 512), 64)))
    index = b.input("index", TensorType(DType.I32, (Dim("rows", 1, 512), 2)))
    graph = b.build(result=b.add("result", ExpertLinearQ(8), x, b.weight("w", TensorType(DType.Q8, (8 * 32, 64))), index))
    (cost,) = step_costs(graph, Load(rows, 1, 0))
    assert cost.weights == weight_bytes(graph["w"].type) * experts / 8
    assert cost.operations == 2 * rows * 2 * 32 * 64  # a row has two slots
    assert cost.launches == launches  # with more pairs than experts they are sorted first


def test_a_smaller_format_reads_less() -> None:
    graph = shape_graph(SHAPES["llama-3-8b"], LIMITS)
    load = Load(8, 8, 32768)
    times = [step_seconds(step_costs(graph, replace(load, kv_bits=KV_BITS[name])), H100) for name in ("bf16", "int8", "int4-token")]
    assert times == sorted(times, reverse=True)


def test_every_gpu_target_has_its_machine() -> None:
    assert set(GPUS) <= set(MACHINES)


def test_a_chain_of_none_gives_one_token_and_of_one_the_rate_more() -> None:
    assert [chain_tokens(0.7, n) for n in (0, 1)] == pytest.approx([1.0, 1.7])


def test_the_verb_prints_ops_formats_plans_and_goals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", "llama-3-70b", "--weights", "int4", "--batch", "16", "--context", "8192", "--kv", "fp8"]) == 0
    text = capsys.readouterr().out
    for part in ("never measured on a card", "paged_attention", "bound by", "int4-token", "plan ", "goals ", "131,072"):
        assert part in text


def test_the_verb_takes_an_artifact(tiny_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", str(tiny_gpu), "--machine", "a100"]) == 0
    assert capsys.readouterr().out.startswith("tiny, int8 weights on a100")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-3-8b", "--batch", "0"], "'0': expected a whole number of at least 1"),
        (["llama-3-8b", "--acceptance", "1"], "--acceptance: '1', expected at least 0 and less than 1"),
        (["llama-3-8b", "--nodes", "64"], "--nodes: '64', expected 0 to 63"),
        (["nowhere"], "nowhere: no such artifact folder"),
        (["llama-3-8b", "--machine", "h300"], "argument --machine: invalid choice"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", *arguments]) == 2
    assert message in capsys.readouterr().err
