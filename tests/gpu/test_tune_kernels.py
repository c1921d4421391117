"""`mlsdc tune` among the builds of a GPU's kernels, and a runtime that launches what it chose, on the fake driver. No GPU."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlsdc.compiler.cli import main
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.bench.tune_kernels import tune_kernels
from mlsdc.runtime.device import cuda_driver
from mlsdc.runtime.device.cuda import CudaDevice
from mlsdc.runtime.device.cuda_driver import Driver
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import ArtifactError, DeviceError
from mlsdc.runtime.kernel_file import DEFAULT, Choice, Gpu, KernelFile, kernels_path
from mlsdc.runtime.manifest import TargetInfo
from mlsdc.runtime.step import Header
from mlsdc.targets.cubin import params
from mlsdc.targets.hardware import GPUS
from mlsdc.targets.nvidia_build import build
from mlsdc.targets.protocol import KernelSpec
from mlsdc.templates.params_triton_rows import LinearQ
from tests.gpu.fake_cuda import FakeCuda, Launched
from tests.gpu.test_interpret import PARAMS, PROMPTS, Said, with_level
from tests.gpu.tiny import VOCAB

PAGES = 40
GPU = Gpu("Fake GPU", 90, 12040)
QUICK: dict[str, Any] = {"rounds": 2, "flush_bytes": 4096}
SIZES = {"null": 8, "i32": 4, "f32": 4}


@pytest.fixture(scope="module")
def artifact(tiny_tunable: Path) -> Artifact:
    return Artifact.open(tiny_tunable)


@pytest.fixture(scope="module")
def target(artifact: Artifact) -> TargetInfo:
    return artifact.manifest.targets[0]


def build_of(artifact: Artifact, target: TargetInfo) -> Callable[[Launched], tuple[str, str]]:
    """(kernel, build) of what was launched, by the bytes of its cubin."""
    found = {artifact.path(info.file).read_bytes(): (key, DEFAULT) for key, info in target.kernels.items()}
    for key, info in target.kernels.items():
        found |= {artifact.path(variant.file).read_bytes(): (key, name) for name, variant in info.variants.items()}
    return lambda launched: found[launched.image]


def tuned(artifact: Artifact, monkeypatch: pytest.MonkeyPatch, cost: Callable[[str, str, int], float], **fake: Any) -> KernelFile:
    """With `cost(kernel, build, grid)` microseconds a launch."""
    which = build_of(artifact, artifact.manifest.targets[0])
    driver = FakeCuda(cost=lambda launched: cost(*which(launched), launched.grid), **fake)
    monkeypatch.setattr(cuda_driver, "load_library", lambda: driver)
    return tune_kernels(artifact.root, **QUICK)


def first(target: TargetInfo, start: str) -> str:
    return next(key for key, info in target.kernels.items() if key.startswith(start) and info.variants)


# what is shipped


def test_linears_and_attention_have_other_builds_and_nothing_else_has(target: TargetInfo) -> None:
    assert {key.partition("_")[0] for key, info in target.kernels.items() if info.variants} == {"linear", "gated", "attend"}
    assert all(info.variants for key, info in target.kernels.items() if key.startswith(("linear", "gated", "attend_split")))


def test_no_two_builds_of_a_kernel_are_the_same_code(artifact: Artifact, target: TargetInfo) -> None:
    for info in target.kernels.values():
        files = [info.file, *(variant.file for variant in info.variants.values())]
        assert len({artifact.manifest.files[file] for file in files}) == len(files)


def test_every_build_fits_its_gpu_without_spills_and_takes_the_kernels_arguments(artifact: Artifact, target: TargetInfo) -> None:
    for info in target.kernels.values():
        wanted = [8 if entry.split(": ")[1].startswith("*") else SIZES[entry.split(": ")[1]] for entry in info.abi]
        for variant in info.variants.values():
            used, gpu = variant.resources, GPUS[target.name]
            assert used["stack_bytes"] == 0
            assert used["shared_bytes"] <= gpu.shared_bytes
            assert used["registers"] * used["threads"] <= gpu.registers
            table = params(artifact.path(variant.file).read_bytes(), variant.entry)
            assert [param.bytes for param in table] == wanted
            assert (variant.grid > 0) == (variant.grain > 0) == (variant.source != info.source)


def test_the_defaults_are_those_of_an_artifact_without_variants(artifact: Artifact, target: TargetInfo, tiny_gpu: Path) -> None:
    plain = Artifact.open(tiny_gpu)
    without = next(t for t in plain.manifest.targets if t.name == target.name)
    assert not any(info.variants for info in without.kernels.values())
    assert {key: replace(info, variants={}) for key, info in target.kernels.items()} == without.kernels
    for info in without.kernels.values():
        assert artifact.manifest.files[info.file] == plain.manifest.files[info.file]


def test_a_build_that_is_missing_or_edited_is_found_out(artifact: Artifact, target: TargetInfo, tmp_path: Path) -> None:
    copy = tmp_path / "copy.mlsdc"
    shutil.copytree(artifact.root, copy)
    info = target.kernels[first(target, "linear")]
    file = copy / next(iter(info.variants.values())).file
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(ArtifactError, match="it was edited"):
        Artifact.open(copy)


SPEC = KernelSpec("linear_q", LinearQ(Header.ROWS, 32, 96, 288, 8), ("w_ptr: *u8", "x_ptr: *i8", "header: *i32", "y_ptr: *f32"))


def test_builds_are_the_same_bytes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("one", "another"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{name}"))
        info = build("h100", GPUS["h100"], ("sm_90",), [SPEC], tmp_path / name, tunable=True)
        assert len(info.kernels[SPEC.key].variants) == 3
        files = sorted(path.relative_to(tmp_path / name).as_posix() for path in (tmp_path / name).rglob("*.*"))
        assert files == sorted(info.files)
        found.append((info, [(tmp_path / name / file).read_bytes() for file in files]))
    assert found[0] == found[1]


def test_a_build_that_does_not_fit_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with as much shared memory as the default takes; from a cache, too, that knows what did not fit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    default = build("h100", GPUS["h100"], ("sm_90",), [SPEC], tmp_path / "first").kernels[SPEC.key]
    small = replace(GPUS["h100"], shared_bytes=default.resources["shared_bytes"])
    for name in ("second", "third"):
        info = build("small", small, ("sm_90",), [SPEC], tmp_path / name, tunable=True)
        kernel = info.kernels[SPEC.key]
        assert kernel.resources == default.resources
        assert "w4s5" not in kernel.variants
        assert all(variant.resources["shared_bytes"] <= small.shared_bytes for variant in kernel.variants.values())
        assert sorted(path.relative_to(tmp_path / name).as_posix() for path in (tmp_path / name).rglob("*.*")) == sorted(info.files)


# tune


def columns(artifact: Artifact, target: TargetInfo, kernel: str) -> int:
    """Programs of a kernel for one tile of rows."""
    return next(launch.grid for launch in artifact.programs("target", target)["forward"].launches if launch.kernel == kernel)


def test_the_fastest_build_is_chosen_for_each_size(artifact: Artifact, target: TargetInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = first(target, "linear")
    narrow = next(name for name in target.kernels[linear].variants if name.startswith("m16n16"))
    most = 2 * target.kernels[linear].variants[narrow].grid  # of 32 rows

    def cost(kernel: str, build: str, programs: int) -> float:
        return 3.0 if (kernel, build, programs) == (linear, narrow, most) else 5.0

    found = tuned(artifact, monkeypatch, cost)
    assert (found.artifact, found.target, found.gpu) == (artifact.sha256, target.name, GPU)
    assert set(found.kernels) == {key for key, info in target.kernels.items() if info.variants}
    assert {choice.size: choice.build for choice in found.kernels[linear]} == dict.fromkeys((1, 2, 4, 8, 16), DEFAULT) | {32: narrow}
    us = {name: 3.0 if name == narrow else 5.0 for name in (DEFAULT, *target.kernels[linear].variants)}
    assert found.kernels[linear][-1].us == pytest.approx(us)
    assert set(found.changed) == {linear}
    assert not found.dropped


def test_a_build_that_gains_next_to_nothing_is_not_chosen(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tuned(artifact, monkeypatch, lambda kernel, build, programs: 100.0 if build == DEFAULT else 99.0).changed


def test_a_build_with_other_bits_is_left_out_and_named(artifact: Artifact, target: TargetInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast it is; other builds of the kernel stay."""
    linear = first(target, "linear")
    wrong, right = target.kernels[linear].variants
    result = [entry.split(": ")[0] for entry in target.kernels[linear].abi].index("y_ptr")
    which, fake = build_of(artifact, target), FakeCuda()

    def execute(launched: Launched) -> None:
        if which(launched) == (linear, wrong):
            fake.block(int.from_bytes(launched.values[result], "little"))[0] ^= 1

    fake.execute, fake.cost = execute, lambda launched: {wrong: 1.0, DEFAULT: 9.0}.get(which(launched)[1], 5.0)
    monkeypatch.setattr(cuda_driver, "load_library", lambda: fake)
    found = tune_kernels(artifact.root, **QUICK)
    assert list(found.dropped) == [linear]
    assert list(found.dropped[linear]) == [wrong]
    assert found.dropped[linear][wrong].startswith("other bits than the default at 1 ")
    assert {choice.build for choice in found.kernels[linear]} == {right}
    assert all(wrong not in choice.us for choice in found.kernels[linear])


def test_what_was_measured_is_read_back(artifact: Artifact, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = tuned(artifact, monkeypatch, lambda kernel, build, programs: 1.0)
    (tmp_path / "x.json").write_text(found.to_json())
    assert KernelFile.read(tmp_path / "x.json") == found


def test_nothing_is_left_on_the_gpu(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeCuda()
    monkeypatch.setattr(cuda_driver, "load_library", lambda: driver)
    tune_kernels(artifact.root, **QUICK)
    assert not driver.memory
    assert not [thing for thing in driver.handles.values() if thing == "event" or isinstance(thing, list)]


def test_a_choice_that_cannot_be_read_is_made_again(artifact: Artifact, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = Artifact.open(shutil.copytree(artifact.root, tmp_path / "tiny.mlsdc"))
    kernels_path(copy.root).write_text("{}")
    monkeypatch.setattr(cuda_driver, "load_library", FakeCuda)
    with pytest.raises(ArtifactError, match="run `mlsdc tune` again"):
        Engine.load(copy.root, device="cuda", num_pages=PAGES)
    assert tuned(copy, monkeypatch, lambda kernel, build, programs: 1.0).kernels


def test_without_variants_there_is_nothing_to_choose(tiny_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "load_library", FakeCuda)
    with pytest.raises(DeviceError, match="has no variants of kernels to choose among: compile with kernels.variants"):
        tune_kernels(tiny_gpu, **QUICK)


# what is launched


def choice(artifact: Artifact, target: TargetInfo, builds: Mapping[str, Mapping[int, str]]) -> KernelFile:
    kernels = {key: tuple(Choice(size, name, {}) for size, name in of.items()) for key, of in builds.items()}
    return KernelFile(artifact.sha256, target.name, GPU, 64, kernels)


def opened(artifact: Artifact, target: TargetInfo, path: Path, fake: FakeCuda | None = None) -> tuple[FakeCuda, CudaDevice]:
    fake = fake or FakeCuda()
    device = CudaDevice(artifact, target, driver=Driver(fake))
    try:
        device.take_kernels(path)
    except BaseException:
        device.close()
        raise
    return fake, device


def test_a_graph_launches_the_build_chosen_for_its_rows(artifact: Artifact, target: TargetInfo, tmp_path: Path) -> None:
    linear = first(target, "linear")
    tall = next(name for name in target.kernels[linear].variants if name.startswith("m32"))
    (tmp_path / "x.json").write_text(choice(artifact, target, {linear: {4: tall, 16: DEFAULT, 32: tall}}).to_json())
    fake, device = opened(artifact, target, tmp_path / "x.json")
    level = device.load_level("target", PAGES)
    which, grid = build_of(artifact, target), columns(artifact, target, linear)
    for rows, name, programs in ((1, tall, grid), (3, tall, grid), (5, DEFAULT, grid), (16, DEFAULT, grid), (17, tall, grid)):
        level.buffers.header[Header.ROWS], level.buffers.header[Header.SEQS], level.buffers.header[Header.OUT] = rows, 1, 1
        fake.launched.clear()
        level.programs["forward"].run()
        of_linear = [(which(one)[1], one.grid) for one in fake.launched if which(one)[0] == linear]
        assert set(of_linear) == {(name, programs)}
        assert {which(one)[1] for one in fake.launched if which(one)[0] != linear} == {DEFAULT}
    assert device.kernel_note == "x.json: other builds of 1 kernels"
    device.close()


def test_only_builds_that_were_chosen_are_loaded(artifact: Artifact, target: TargetInfo, tmp_path: Path) -> None:
    linear = first(target, "linear")
    name = next(iter(target.kernels[linear].variants))
    (tmp_path / "x.json").write_text(choice(artifact, target, {linear: {32: name}}).to_json())
    fake, device = opened(artifact, target, tmp_path / "x.json")
    device.load_level("target", PAGES)
    assert fake.calls.count("cuModuleLoadData") == len(target.kernels) + 1
    device.close()


def test_texts_with_other_tiles_are_the_cpus(root: Path, tmp_path: Path, artifact: Artifact, target: TargetInfo, tiny_cpu: Path) -> None:
    """Through graphs, with drafts and with sampling, narrow tiles for few rows and tall ones for more: no bit of a text depends on the
    build (law L2)."""
    cpu: Said = with_level(tiny_cpu, None)
    texts = [prompt + text for prompt, text in zip(PROMPTS, cpu.texts, strict=True)]
    builds: dict[str, dict[int, str]] = {}
    for key, info in target.kernels.items():
        for name, variant in info.variants.items():
            if variant.grid:
                builds.setdefault(key, {})[4 if name.startswith("m16") else 32] = name
    (tmp_path / "x.json").write_text(choice(artifact, target, builds).to_json())
    job = tmp_path / "job.pickle"
    job.write_bytes(pickle.dumps({"pages": PAGES, "texts": texts, "vocab": VOCAB, "prompts": PROMPTS[:2], "params": PARAMS[:2],
                                  "kernels": str(tmp_path / "x.json")}))
    command = [sys.executable, "-m", "tests.gpu.run_cuda", str(artifact.root), str(job)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["texts"] == cpu.texts[:2]
    wanted = {target.kernels[key].variants[name].entry for key, of in builds.items() for name in of.values()}
    assert len(wanted) > len(builds) > 3
    assert wanted <= set(found["entries"])
    assert not builds.keys() & set(found["entries"])


# what is not used, and what is refused


@pytest.mark.parametrize(("other", "why"), [
    ({"artifact": "0123456789abcdef"}, "x.json is of another artifact (0123456789ab), run `mlsdc tune` again"),
    ({"target": "b200"}, "x.json is of target b200, this is h100, run `mlsdc tune` again"),
    ({"gpu": Gpu("Other", 90, 12040)}, "is of another machine (Other, sm_90, a driver for CUDA 12.4; this is Fake GPU, sm_90, a driver"),
    ({"gpu": Gpu("Fake GPU", 90, 13000)}, "is of another machine (Fake GPU, sm_90, a driver for CUDA 13.0; this is Fake GPU, sm_90, "),
    ({"gpu": Gpu("Fake GPU", 100, 12040)}, "is of another machine (Fake GPU, sm_100, a driver"),
])
def test_a_choice_of_something_else_is_not_used_and_that_is_said(
        artifact: Artifact, target: TargetInfo, tmp_path: Path, other: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture) -> None:
    linear = first(target, "linear")
    (tmp_path / "x.json").write_text(replace(choice(artifact, target, {linear: {32: "not looked at"}}), **other).to_json())
    with caplog.at_level(logging.WARNING, logger="mlsdc"):
        _, device = opened(artifact, target, tmp_path / "x.json")
    assert device.kernel_note.startswith("shipped default: x.json is of ")
    assert why in device.kernel_note
    assert device.kernel_note in caplog.text
    assert device.chosen(linear) == []
    device.close()


@pytest.mark.parametrize(("kernel", "build", "why"), [
    ("linear_that_is_not", DEFAULT, "target h100 has no kernel 'linear_that_is_not'; run `mlsdc tune` again or remove it"),
    (None, "w3s3", "has no build 'w3s3', it has default, "),
])
def test_a_name_that_is_not_there_is_one_line(
        artifact: Artifact, target: TargetInfo, tmp_path: Path, kernel: str | None, build: str, why: str) -> None:
    name = kernel or first(target, "linear")
    (tmp_path / "x.json").write_text(choice(artifact, target, {name: {32: build}}).to_json())
    with pytest.raises(ArtifactError) as caught:
        opened(artifact, target, tmp_path / "x.json")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_without_a_file_is_refused(artifact: Artifact, target: TargetInfo, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="x.json: no such file; `mlsdc tune` makes it"):
        opened(artifact, target, tmp_path / "x.json")


@pytest.mark.parametrize("change", [
    None, {"format": 99}, {"kernels": 3}, {"kernels": {"k": []}}, {"kernels": {"k": [{"size": 0, "build": "default", "us": {}}]}},
    {"kernels": {"k": [{"size": 4, "build": "default", "us": {}}, {"size": 4, "build": "default", "us": {}}]}},
    {"kernels": {"k": [{"size": 4, "build": "default", "us": {"default": -1}}]}},
    {"kernels": {"k": [{"size": 4, "build": "default", "us": {"default": float("nan")}}]}}, {"gpu": "H100"}, {"dropped": {"k": 1}},
])
def test_a_broken_file_is_one_line(artifact: Artifact, target: TargetInfo, tmp_path: Path, change: dict[str, Any] | None) -> None:
    raw = json.loads(choice(artifact, target, {}).to_json())
    (tmp_path / "x.json").write_text("nonsense" if change is None else json.dumps(raw | change))
    expected = "kernels format 99, this runtime reads 1" if change == {"format": 99} else "x.json: no choice of kernels"
    with pytest.raises(ArtifactError, match=expected) as caught:
        KernelFile.read(tmp_path / "x.json")
    assert "\n" not in str(caught.value)


# the command


def test_the_command_writes_beside_the_artifact_and_other_verbs_show_it(
        tiny_tunable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.mlsdc"
    shutil.copytree(tiny_tunable, copy)
    artifact = Artifact.open(copy)
    which = build_of(artifact, artifact.manifest.targets[0])
    fake = FakeCuda(free=4 << 20, cost=lambda launched: 9.0 if which(launched)[1] == DEFAULT else 4.0)
    monkeypatch.setattr(cuda_driver, "load_library", lambda: fake)
    assert main(["tune", str(copy), "--kernels-only"]) == 0
    text = capsys.readouterr().out
    assert f"written: {tmp_path / 'copy.kernels.json'}" in text
    assert "kernels  of h100 on Fake GPU, sm_90, a driver for CUDA 12.4: " in text
    assert Artifact.open(copy).sha256 == artifact.sha256
    for verb in (["explain", str(copy)], ["inspect", str(copy), "--kernels"]):
        assert main(verb) == 0
        assert "kernels  of h100 on Fake GPU, sm_90, a driver for CUDA 12.4: " in capsys.readouterr().out
    monkeypatch.setattr(cuda_driver, "load_library", FakeCuda)
    with Engine.load(copy, device="cuda") as engine:
        changed = len(KernelFile.read(kernels_path(copy)).changed)
        assert engine.device.kernel_note == f"copy.kernels.json: other builds of {changed} kernels"
        assert changed > 3


def test_of_a_cpu_it_says_that_there_are_none(tiny_cpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(tiny_cpu), "--kernels-only"]) == 2
    assert "--kernels-only: target cpu-" in (said := capsys.readouterr().err)
    assert said.endswith("has no kernels with several builds to choose among\n")


def test_without_prompts_only_kernels_are_tuned(tiny_cpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(tiny_cpu)]) == 2
    assert "--prompts: give a file of prompts like yours; only --kernels-only does without" in capsys.readouterr().err


def test_a_cpu_takes_no_choice_of_kernels(tiny_cpu: Path, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="x.json: device .* has no kernels to choose among"):
        Engine.load(tiny_cpu, threads=1, kernel_file=tmp_path / "x.json")
