"""`mlsdc bench gpu-check` on the fake driver: it times, it compares, and it fails where a card computes something else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlsdc.compiler.capture import load_source
from mlsdc.compiler.cli import main
from mlsdc.compiler.cli_gpu_check import compare
from mlsdc.compiler.config import load_config
from mlsdc.compiler.gpu_peers import compare as compare_peers
from mlsdc.compiler.gpu_peers import linears
from mlsdc.compiler.roofline_shapes import Shape, shape_graph
from mlsdc.runtime.device import cuda_driver
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.step import Limits
from tests.gpu.fake_cuda import FakeCuda


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Its kernels do nothing at all."""
    fake = FakeCuda()
    monkeypatch.setattr(cuda_driver, "load_library", lambda: fake)
    return fake


def test_a_card_that_computes_nothing_is_found_out(
        tiny_gpu: Path, tiny_cpu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "check.json"
    assert main(["bench", "gpu-check", str(tiny_gpu), "--reference", str(tiny_cpu), "--json", str(out)]) == 1
    text, found = capsys.readouterr().out, json.loads(out.read_text())
    assert "numerics    WRONG" in text
    assert (found["gpu"], found["target"], found["passed"]) == ("Fake GPU", "h100", False)


def test_every_kernel_of_a_step_and_steps_up_to_the_largest_tree_are_timed(tiny_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu-check", str(tiny_gpu), "--json", "-"]) == 1  # the reference interpreter finds it out, too
    found = json.loads(capsys.readouterr().out)
    assert [(step["rows"], step["context"]) for step in found["steps"]] == [(1, 112), (1, 112), (8, 112), (16, 112)]
    assert sum(kernel["launches"] for kernel in found["kernels"]) == 27
    assert found["numerics"] is None
    (embed,) = (kernel for kernel in found["by_kernel"] if kernel["kernel"].startswith("embed"))
    assert not embed["passed"]  # the others were fed zeros
    assert [needle["passed"] for needle in found["needles"]] == [False]


def test_a_check_leaves_no_memory_and_no_events_behind(tiny_gpu: Path, fake: FakeCuda) -> None:
    assert main(["bench", "gpu-check", str(tiny_gpu)]) == 1
    assert not fake.memory
    assert "cuEventRecord" in fake.calls
    assert "event" not in [thing for thing in fake.handles.values() if isinstance(thing, str)]


def test_a_machine_without_a_gpu_is_told(tiny_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cuda_driver, "load_library", lambda: FakeCuda(devices=0))
    assert main(["bench", "gpu-check", str(tiny_gpu)]) == 2
    assert "the NVIDIA driver finds no GPU" in capsys.readouterr().err


@pytest.fixture(scope="module")
def interpreted(root: Path, tiny_gpu: Path, levels_folder: Path) -> list[dict[str, Any]]:
    """A card that computes right, one whose gated kernel and cuts of top_k do not, and over a grouped cache one that settles nothing."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "0"}
    command = [sys.executable, "-m", "tests.gpu.run_gpu_check", tiny_gpu, levels_folder / "levels.mlsdc"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_kernel_of_a_right_card_is_as_the_reference_interpreter_has_it(interpreted: list[dict[str, Any]]) -> None:
    right = interpreted[0]
    assert len(right["kernels"]) > 15
    assert [kernel["kernel"] for kernel in right["kernels"] if not kernel["passed"]] == []
    assert right["notes"] == ["not compared one by one: none"]
    assert {"follow", "ngram_clear", "ngram_observe_order4", "ngram_propose_order4"} <= {kernel["kernel"] for kernel in right["kernels"]}


def test_wrong_kernels_are_named_and_no_others(interpreted: list[dict[str, Any]]) -> None:
    wrong = {re.split("_w8|_n2", kernel["kernel"])[0] for kernel in interpreted[1]["kernels"] if not kernel["passed"]}
    assert wrong == {"gated_q", "sample_bound"}


def test_of_a_grouped_cache_pages_ring_and_commit_are_compared_each_by_itself(interpreted: list[dict[str, Any]]) -> None:
    found = {kernel["kernel"].split("_int4")[0]: kernel["passed"] for kernel in interpreted[2]["kernels"]}
    assert {name for name, passed in found.items() if not passed} == {"settle_kv"}
    assert {"append_kv", "quantise_kv", "commit"} <= set(found)


def test_a_needle_is_found(interpreted: list[dict[str, Any]]) -> None:
    assert interpreted[0]["needle"]["passed"]
    assert interpreted[2]["needle"]["passed"]


def test_what_torch_takes_is_asked_for_each_shape_once() -> None:
    graph = shape_graph(Shape(64, 96, 2, 4, 2, 32, 128), Limits(64, 2, 16, 4, 3))
    notes: list[str] = []
    found = [(peer.peer, peer.what) for peer in compare_peers(graph, 48, "cpu", notes)]
    assert len(found) == len(linears(graph)) + 1
    assert found[-1] == ("torch SDPA", "attention of a row over 48 tokens, 4 heads over 2 of 32, bf16")
    assert notes == ["no comparison with FlashInfer: it is not installed"]


def test_equal_logits_pass_and_others_do_not() -> None:
    x = np.random.default_rng(0).standard_normal((4, 16), np.float32)
    assert compare(x, x, 16).passed
    assert compare(x, x, 16).same == 4
    assert not compare(x + np.eye(4, 16, dtype=np.float32), x, 16).passed
    assert not compare(np.full_like(x, np.nan), x, 16).passed


@pytest.mark.parametrize(("file", "context"), [("needle.yaml", 131072), ("llama-3-8b.yaml", 16384)])
def test_what_is_prepared_for_a_card_is_a_model_of_random_weights_with_room(root: Path, file: str, context: int) -> None:
    config = load_config(root / "examples" / "gpu-check" / file)
    source = load_source(config.target.model, config.folder)
    limits = config.resolve_limits(int(source.config["max_position_embeddings"]))
    assert limits.max_model_len >= context
    heads, dim, layers = (int(source.config[key]) for key in ("num_key_value_heads", "head_dim", "num_hidden_layers"))
    kv = KvGeometry("bf16" if context < 20000 else "int8", 32, layers, heads, dim)
    assert config.memory.kv_pool is not None
    assert config.memory.kv_pool > kv.page_bytes * (limits.pages_per_seq(32) + limits.scratch_pages(32))
