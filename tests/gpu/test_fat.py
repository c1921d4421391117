"""One artifact for a GPU and a CPU: each part is what an artifact for it alone is, and the loader picks one and says so."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlsdc.compiler.cli import main
from mlsdc.compiler.driver import weights_path
from mlsdc.compiler.quantise import quantise_f8, quantise_q4, quantise_q8
from mlsdc.compiler.types import DType, TensorType
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device import cuda_driver
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.memory_plan import plan_artifact
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.step import Limits
from mlsdc.targets import make_target, native_target
from tests.gpu.fake_cuda import FakeCuda

PROMPTS = [list(b"one two one two"), list(b"zz")]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
MAKE: Mapping[DType, Any] = {DType.Q8: quantise_q8, DType.Q4: quantise_q4, DType.F8: quantise_f8}


@pytest.fixture(scope="module")
def fat(tiny_fat: Path) -> Artifact:
    return Artifact.open(tiny_fat)


def code(artifact: Artifact, target: str) -> dict[str, str]:
    """Hashes of a target's kernels and programs."""
    return {name: sha for name, sha in artifact.manifest.files.items() if name.startswith((f"kernels/{target}/", f"program/{target}/"))}


def weights(artifact: Artifact, target: str) -> dict[str, str]:
    found = artifact.level_weights("target", target)
    return {name: hashlib.sha256(found.tensor(name).tobytes()).hexdigest() for name in found.files}


def texts(path: Path, device: str) -> list[list[int]]:
    with Engine.load(path, device=device, num_pages=40) as engine:
        return [list(result.token_ids) for result in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(("kind", "alone"), [("cpu", "tiny_cpu"), ("gpu", "tiny_gpu")])
def test_code_and_weights_are_those_of_an_artifact_for_one_kind(
        fat: Artifact, kind: str, alone: str, request: pytest.FixtureRequest) -> None:
    other = Artifact.open(request.getfixturevalue(alone))
    target = "h100" if kind == "gpu" else native_target()
    assert code(fat, target) == code(other, target)
    assert weights(fat, target) == weights(other, target)


def test_its_cpu_says_what_an_artifact_for_the_cpu_alone_says(tiny_fat: Path, tiny_cpu: Path) -> None:
    assert texts(tiny_fat, "cpu") == texts(tiny_cpu, "cpu")


def test_its_gpu_program_says_it_too(tiny_fat: Path, tiny_cpu: Path) -> None:
    assert texts(tiny_fat, "interpret") == texts(tiny_cpu, "cpu")


def test_bytes_that_are_the_same_are_there_once(fat: Artifact) -> None:
    level = fat.manifest.target_level
    own = fat.path(level.other_weights["h100"])
    found = fat.level_weights("target", "h100")
    shared = {name for name, file in found.files.items() if file.path != own}
    assert any(name.endswith("norm") for name in shared)
    assert set(fat.manifest.weights) == {level.weights, level.other_weights["h100"]}
    assert not shared & set(found.files[next(name for name in found.files if name not in shared)].tensors)


def test_the_memory_plan_counts_what_a_target_reads(fat: Artifact, tiny_gpu: Path) -> None:
    h100 = next(target for target in fat.manifest.targets if target.name == "h100")
    found = fat.level_weights("target", "h100")
    alone = Artifact.open(tiny_gpu).level_weights("target", "h100")
    assert plan_artifact(fat, h100).levels[-1].weights == found.num_bytes == alone.num_bytes


def test_every_byte_is_verified(tiny_fat: Path, fat: Artifact) -> None:
    assert set(fat.manifest.target_level.other_weights.values()) <= set(fat.verify())


def test_inspect_shows_both(tiny_fat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_fat)]) == 0
    text = capsys.readouterr().out
    assert "target     h100 (cuda): " in text
    assert f"target     {native_target()} (cpu): " in text
    assert "  weights  h100: " in text
    assert main(["inspect", str(tiny_fat), "--kernels"]) == 0
    assert all(target.name in text for target in Artifact.open(tiny_fat).manifest.targets)


# choosing


def picked(fat: Artifact, monkeypatch: pytest.MonkeyPatch, **fake: Any) -> tuple[str, str]:
    monkeypatch.setattr(cuda_driver, "load_library", lambda: FakeCuda(**fake))
    target = fat.pick_target("auto")
    return target.name, target.device


def test_a_gpu_that_it_has_code_for_comes_first(fat: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    assert picked(fat, monkeypatch, sm=90) == ("h100", "cuda:0")


def test_without_a_driver_it_is_the_cpu(fat: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MLSDC_LIBCUDA", "libcuda-that-is-not-there.so")
    assert fat.pick_target("auto").device == "cpu"
    assert not caplog.records


def test_a_driver_without_a_gpu_is_none(fat: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert picked(fat, monkeypatch, devices=0) == (native_target(), "cpu")
    assert not caplog.records


def test_a_gpu_of_another_kind_is_said_to_be_left_alone(
        fat: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mlsdc"):
        assert picked(fat, monkeypatch, sm=75) == (native_target(), "cpu")
    assert "built for h100 (sm_90), cuda:0 (Fake GPU) is sm_75: compile for it; cpu-" in caplog.text


def test_a_driver_too_old_for_the_code_is_said_and_the_cpu_taken_unless_the_gpu_is_asked_for(
        fat: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mlsdc"):
        assert picked(fat, monkeypatch, version=11080) == (native_target(), "cpu")
    why = "the NVIDIA driver speaks CUDA 11.8, target h100 needs CUDA 12.0 (driver 525 or newer): update the driver"
    (record,) = caplog.records
    assert f"{why}; cpu-" in record.getMessage()
    with pytest.raises(ArtifactError) as caught:
        fat.pick_target("cuda")
    assert str(caught.value) == f"{fat.root.name}: built for h100; {why}"


def test_what_is_asked_for_is_taken_or_refused(fat: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "load_library", lambda: FakeCuda(sm=75))
    assert fat.pick_target("cpu").device == "cpu"
    with pytest.raises(ArtifactError, match=r"built for h100; built for h100 \(sm_90\), cuda:0 \(Fake GPU\) is sm_75"):
        fat.pick_target("cuda")


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16, DType.Q8, DType.Q4, DType.F8])
def test_layouts_of_one_name_are_the_same_bytes(dtype: DType) -> None:
    """And those of another name are not, or a fat artifact holds them twice for nothing."""
    values = np.random.default_rng(0).standard_normal((48, 96), np.float32)
    rows = MAKE[dtype](values) if dtype in MAKE else values
    type_ = TensorType(dtype, values.shape)
    limits = Limits(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32, max_logit_rows=32, max_tree_nodes=15)
    cpu, gpu = make_target("cpu-native", limits), make_target("h100", limits)
    same = np.array_equal(cpu.pack(type_, rows), gpu.pack(type_, rows))
    assert same == (cpu.layout(type_) == gpu.layout(type_))


def test_gpus_of_both_makers_read_the_same_files() -> None:
    limits = Limits(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32, max_logit_rows=32, max_tree_nodes=15)
    assert {name: make_target(name, limits).family for name in ("h100", "mi300x", "cpu-native")} == {
        "h100": "gpu", "mi300x": "gpu", "cpu-native": "cpu"}


def test_a_level_s_name_cannot_be_another_file_of_weights() -> None:
    """A level may be called `target.gpu`, or `gpu`."""
    files = {weights_path(level, family) for level in ("target", "target.gpu", "gpu") for family in ("", "gpu")}
    assert len(files) == 6
