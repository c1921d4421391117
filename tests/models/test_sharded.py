"""A model split over processes: numbers and texts of one process, and a rank that dies is one error."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlsdc.compiler import compile_model
from mlsdc.compiler.capture import load_source
from mlsdc.compiler.errors import CompileError, ConfigError
from mlsdc.compiler.graph import Builder, Graph, Input, Node, Weight
from mlsdc.compiler.interpret import Context, KvState, StepTree, evaluate, given
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.ops_core import Binary
from mlsdc.compiler.ops_nn import Linear
from mlsdc.compiler.ops_shard import AllReduce
from mlsdc.compiler.pipeline import run_pipeline
from mlsdc.compiler.text import parse_graph, print_graph
from mlsdc.compiler.types import Dim, DType, KvType, TensorType
from mlsdc.compiler.weights import read_weight
from mlsdc.passes import PassOptions, default_pipeline
from mlsdc.passes.shard import of_rank, sharded
from mlsdc.runtime import Engine, SamplingParams
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.base import Device
from mlsdc.runtime.device.cpu_ranks import LeadDevice
from mlsdc.runtime.device.ranks import LedRanks
from mlsdc.runtime.errors import DeviceError, MlsdcError
from mlsdc.runtime.kv_format import KvGeometry
from tests.function_level import sends_all
from tests.models.tiny import LIMITS, PAGE, after, captured, folder, tokens_for
from tests.once import once

FAMILY = "Llama 2"
RANKS = 2
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
LOOKUP: dict[str, Any] = {"kind": "ngram", "name": "lookup", "max_nodes": 7, "width": 2}
PROMPTS = [list(range(40, 80)), [5, 6, 7, 5, 6, 7, 5, 6], [9] * 5]


def config(ranks: int, **target: Any) -> dict[str, Any]:
    return {
        "target": {"model": str(folder(FAMILY)), "kv": {"dtype": "bf16", "page_size": PAGE}, **target},
        "cascade": [LOOKUP], "memory": {"kv_pool": "2MiB"}, "tensor_parallel": ranks,
        "limits": {"max_model_len": LIMITS.max_model_len, "max_num_seqs": 4, "max_num_batched_tokens": 64},
    }  # fmt: skip


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole.mlsdc` and `split.mlsdc`."""

    def make(path: Path) -> None:
        compile_model(config(1), path / "whole.mlsdc")
        compile_model(config(RANKS), path / "split.mlsdc")

    return once(tmp_path_factory, "sharded", make)


@pytest.fixture(scope="session")
def split(artifacts: Path) -> Path:
    return artifacts / "split.mlsdc"


def served(artifact: Path) -> tuple[list[Any], list[np.ndarray], float]:
    """Texts, the logits of the first step's row, and how many drafts were accepted."""
    seen: list[np.ndarray] = []
    with Engine.load(artifact, threads=1) as engine:
        sends_all(engine)
        engine.watch_forward(lambda buffers, logits: seen.append(logits[: int(buffers.header[2])].copy()))
        engine.generate([PROMPTS[0]], SamplingParams(max_tokens=1, ignore_eos=True))
        first = list(seen)
        results = engine.generate(PROMPTS, GREEDY)
        return [result.token_ids for result in results], first, sum(result.statistics.accepted for result in results)


def test_two_processes_give_one_processes_logits_and_text_with_speculation_on(artifacts: Path, split: Path) -> None:
    texts, logits, accepted = served(artifacts / "whole.mlsdc")
    texts_split, logits_split, accepted_split = served(split)
    for whole, part in zip(logits, logits_split, strict=True):
        assert np.abs(whole - part).max() <= 1e-4 * np.abs(whole).max()
    assert texts_split == texts
    assert accepted_split == accepted > 0


def test_the_artifact_holds_each_ranks_shard_and_says_so(artifacts: Path, split: Path) -> None:
    manifest = Artifact.open(split).manifest
    assert (manifest.world_size, manifest.rank) == (RANKS, 0)
    assert sorted(manifest.weights) == ["weights/target.rank1.safetensors", "weights/target.safetensors"]
    (whole,) = Artifact.open(artifacts / "whole.mlsdc").manifest.weights.values()
    each = [size for size, _ in manifest.weights.values()]
    assert each[0] == each[1] < whole[0]
    assert manifest.target_level.kv is not None
    assert manifest.target_level.kv.num_kv_heads == 1
    assert Artifact.open(split).verify()


def test_ranks_end_with_the_engine(split: Path) -> None:
    engine = Engine.load(split, threads=1)
    processes = led(engine.device).processes
    engine.generate([PROMPTS[1]], GREEDY)
    engine.close()
    assert [process.returncode for process in processes] == [0]


def led(device: Device) -> LedRanks:
    assert isinstance(device, LeadDevice)
    assert isinstance(device.ranks, LedRanks)
    return device.ranks


def test_a_rank_that_dies_is_one_error_and_not_a_hang(split: Path) -> None:
    with Engine.load(split, threads=1) as engine:
        process = led(engine.device).processes[0]
        engine.generate([PROMPTS[1]], GREEDY)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(DeviceError) as caught:
            engine.generate([PROMPTS[1]], GREEDY)
    assert str(caught.value) == f"rank 1 of 2 (process {process.pid}) was ended by signal 9; load the artifact again"


def test_a_rank_that_cannot_load_its_share_says_why(split: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "split.mlsdc"
    shutil.copytree(split, copy)
    engine = Engine.load(copy, threads=1)
    engine.close()
    (copy / "weights" / "target.rank1.safetensors").unlink()
    with pytest.raises(MlsdcError, match="split.mlsdc/weights/target.rank1.safetensors: missing"):
        Engine.load(copy, threads=1)


def test_launches_of_a_split_program_are_not_timed_one_by_one(split: Path) -> None:
    with Engine.load(split, threads=1) as engine, pytest.raises(DeviceError, match="program 'forward' runs on 2 ranks"):
        engine._memory.programs["forward"].profile()


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_every_ranks_weights_are_a_share_of_the_whole_ones(weights: str) -> None:
    """Put side by side again along the axis that was split, source by source."""
    source = load_source(str(folder(FAMILY))).weights
    level = final(weights)
    other = of_rank(level, 1).graphs["forward"]
    split = [node for node in level.graphs["forward"].weights() if isinstance(node.op, Weight) and node.op.shard]
    assert len(split) == 8
    for node in split:
        assert isinstance(node.op, Weight)
        axis = node.op.shard[0]
        assert getattr(other[node.name].op, "shard", None) == (axis, 1, RANKS)

        def share(name: str, shard: tuple[int, ...], node: Node = node) -> np.ndarray:
            return numbers(read_weight(replace(node, op=Weight((name,), shard)), source))

        for name in node.op.sources:
            parts = [share(name, (axis, rank, RANKS)) for rank in range(RANKS)]
            assert np.array_equal(np.concatenate(parts, axis), share(name, ())), name


def numbers(weight: Any) -> np.ndarray:
    values: np.ndarray = weight if isinstance(weight, np.ndarray) else weight.dequantise()
    return values


def final(weights: str = "int8") -> LevelModule:
    passes = default_pipeline(PassOptions(LIMITS, kv_page_size=PAGE, tensor_parallel=RANKS, weights=weights))
    module = Module("tiny", (LevelModule("target", "model", {}, {"forward": captured(FAMILY).graph}),))
    return run_pipeline(module, passes).target


@pytest.mark.parametrize("family", ["Llama 2", "TinyLlama", "Gemma 2", "Qwen3"])
def test_summed_over_ranks_the_graphs_compute_what_the_whole_one_does(family: str) -> None:
    """In lockstep: at an all_reduce every rank has the sum. Biases, QK-norms, soft-caps and post-norms are split, too."""
    whole = after(family, "insert-paged-kv")
    graph = after(family, "check-kv-outliers")
    passes = default_pipeline(PassOptions(LIMITS, kv_page_size=PAGE, tensor_parallel=RANKS))
    names = [pass_.name for pass_ in passes]
    module = Module("tiny", (LevelModule("target", "model", {}, {"forward": graph}),))
    level = run_pipeline(module, passes[names.index("shard") : names.index("insert-paged-kv") + 1]).target
    ranks = [of_rank(level, rank).graphs["forward"] for rank in range(RANKS)]
    assert parse_graph(print_graph(ranks[0])) == ranks[0]
    (expected,), found = lockstep(family, [whole]), lockstep(family, ranks)
    for logits in found:
        assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


def lockstep(family: str, graphs: list[Graph]) -> list[np.ndarray]:
    """Logits of a prompt by each rank's graph."""
    tokens = tokens_for(family, 12).numpy().astype(np.int32)
    tree = StepTree.prefill(len(tokens), PAGE)
    context = Context()
    values: list[dict[str, Any]] = [{} for _ in graphs]
    for nodes in zip(*graphs, strict=True):
        for node, have in zip(nodes, values, strict=True):
            if isinstance(node.op, Input | Weight):
                inputs: dict[str, Any] = {"tokens": tokens, "positions": tree.positions, "out_rows": tree.positions, "tree": tree}
                if isinstance(node.type, KvType):
                    kv = node.type
                    inputs[node.name] = KvState.empty(KvGeometry(kv.format, kv.page_size, kv.num_layers, kv.num_kv_heads, kv.head_dim), 4)
                have[node.name] = given(node, inputs, lambda n: read_weight(n, captured(family).weights), context)
            elif isinstance(node.op, AllReduce):
                have[node.name] = sum(other[node.inputs[0]] for other in values)
            else:
                have[node.name] = evaluate(node, have, context)
    return [have[dict(graph.outputs)["logits"]].numpy() for graph, have in zip(graphs, values, strict=True)]


@pytest.mark.parametrize(("family", "ranks", "message"), [
    ("Llama 2", 4, "4 ranks cannot share the 4 heads and 2 kv heads of %layers.0.attn.attend: both must be multiples of the"),
    ("Phi-3", 2, "reads heads of it: one linear for each of q, k and v can be split"),
    ("Mixtral", 2, "cannot be split over 2 ranks"),
])  # fmt: skip
def test_what_cannot_be_split_is_refused_by_name(family: str, ranks: int, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        sharded(after(family, "check-kv-outliers"), ranks)
    assert str(caught.value).startswith("tensor_parallel: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def before_head(name: str) -> Graph:
    """logits = head(x + linear(x))"""
    builder = Builder("draft")
    x = builder.input("x", TensorType(DType.F32, (Dim("rows", 1, 8), 64)))
    inner = builder.add(name, Linear(), x, builder.weight("w", TensorType(DType.F32, (64, 64)), "w"))
    total, head = builder.add("sum", Binary("add"), x, inner), builder.weight("head", TensorType(DType.F32, (96, 64)), "head")
    return builder.build(y=builder.add("logits", Linear(), total, head))


def test_the_exit_of_the_first_layers_is_whole_on_every_rank() -> None:
    """It stands before the head; a linear of another name there is refused."""
    assert sharded(before_head("exit.inner"), RANKS) == before_head("exit.inner")
    with pytest.raises(CompileError, match=r"%other.inner \(linear\) cannot be split over 2 ranks: it is neither before nor after"):
        sharded(before_head("other.inner"), RANKS)


@pytest.mark.parametrize(("change", "verify", "message"), [
    ({"tensor_parallel": 0}, False, "tensor_parallel: expected a number of processes from 1 to 64, found 0"),
    ({"tensor_parallel": "two"}, False, "tensor_parallel: expected a number of processes from 1 to 64, found 'two'"),
    ({"hardware": "h100"}, False, "tensor_parallel: target h100 has no all-reduce yet; CPU targets have"),
    ({"passes": {"disable": ["shard"]}}, False, "passes.disable: 'shard' is what tensor_parallel asks for; leave out one of the two"),
    ({}, True, "tensor_parallel: --verify-each executes one rank alone"),
])  # fmt: skip
def test_a_config_that_cannot_be_split_is_refused_before_the_work(
        change: dict[str, Any], verify: bool, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compile_model(config(RANKS) | change, tmp_path / "m.mlsdc", verify_each=verify)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_explain_names_the_pass(split: Path) -> None:
    passes = json.loads((split / "explain.json").read_text())["passes"]
    assert any(entry["pass"] == "shard" and entry["fired"] for entry in passes)
