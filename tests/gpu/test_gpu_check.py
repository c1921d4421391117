"""`mlsdc bench gpu-check` on the fake driver: it times, it compares, and it fails where a card computes something else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mlsdc.compiler.cli import main
from mlsdc.compiler.gpu_check import compare
from mlsdc.runtime.device import cuda_driver
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


def test_every_kernel_of_a_step_and_three_steps_are_timed(tiny_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu-check", str(tiny_gpu), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(step["rows"], step["context"]) for step in found["steps"]] == [(1, 112), (1, 112), (8, 112)]
    assert sum(kernel["launches"] for kernel in found["kernels"]) == 27
    assert found["numerics"] is None


def test_a_check_leaves_no_memory_behind(tiny_gpu: Path, fake: FakeCuda) -> None:
    assert main(["bench", "gpu-check", str(tiny_gpu)]) == 0
    assert not fake.memory


def test_a_machine_without_a_gpu_is_told(tiny_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cuda_driver, "load_library", lambda: FakeCuda(devices=0))
    assert main(["bench", "gpu-check", str(tiny_gpu)]) == 2
    assert "the NVIDIA driver finds no GPU" in capsys.readouterr().err


def test_equal_logits_pass_and_others_do_not() -> None:
    x = np.random.default_rng(0).standard_normal((4, 16), np.float32)
    assert compare(x, x, 16).passed
    assert compare(x, x, 16).same == 4
    assert not compare(x + np.eye(4, 16, dtype=np.float32), x, 16).passed
    assert not compare(np.full_like(x, np.nan), x, 16).passed
