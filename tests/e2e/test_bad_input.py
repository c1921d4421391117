"""Bad input of every kind: one clear line, exit code 2, nothing half-written, nothing changed (law L7)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from mlsdc.compiler.pack import hash_files
from mlsdc.runtime.manifest import seal


def mlsdc(*argv: str, cwd: Path, before: str = "") -> str:
    """Run the CLI, `before` first; returns the error's text, having checked that it is one line and the exit code 2."""
    code = f"import sys\n{before}\nfrom mlsdc.compiler.cli import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert done.stdout == ""
    return lines[0].removeprefix("mlsdc: error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "prompt: empty, expected at least one token"),
        (["--prompt", "x" * 200], "prompt: 200 tokens, at most 127 (limits.max_model_len 128)"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens: 0, expected "),
    ],
)
def test_bad_request(tiny: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    assert mlsdc("run", str(tiny), *arguments, cwd=tmp_path).startswith(message)


def cut_weights(artifact: Path) -> None:
    path = artifact / "weights" / "target.safetensors"
    os.truncate(path, path.stat().st_size - 64)


def edit_program(artifact: Path) -> None:
    (path,) = artifact.glob("program/*/target.forward.json")
    path.write_text(path.read_text().replace('"grid":1', '"grid":9', 1))


def choose_a_launch(artifact: Path) -> None:
    """As a compiler would write it that takes the CPU for a device which chooses among launches."""
    (path,) = artifact.glob("program/*/target.forward.json")
    path.write_text(path.read_text().replace('"grain":1', '"grain":1,"over":4', 1))
    manifest = json.loads((artifact / "manifest.json").read_text())
    manifest["files"][path.relative_to(artifact).as_posix()] = sha256(path.read_bytes()).hexdigest()
    (artifact / "manifest.json").write_text(seal(manifest))


def remove_kernels(artifact: Path) -> None:
    next(artifact.glob("kernels/*/kernels.so")).unlink()


def cut_manifest(artifact: Path) -> None:
    path = artifact / "manifest.json"
    path.write_text(path.read_text()[:1000])


def other_isa(artifact: Path) -> None:
    path = artifact / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["targets"][0]["requires"].append("amx-future")
    path.write_text(seal(manifest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_weights, "weights/target.safetensors: "),
        (edit_program, "it was edited; copy or compile it again"),
        (choose_a_launch, "is for some counts only, and a CPU runs every launch; compile again"),
        (remove_kernels, "kernels.so: missing: the artifact is incomplete"),
        (cut_manifest, "manifest.json: not a manifest"),
        (other_isa, "lacks amx-future"),
    ],
)
def test_damaged_artifact_is_not_run(tiny: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    copy = tmp_path / "copy.mlsdc"
    shutil.copytree(tiny, copy)
    damage(copy)
    assert message in mlsdc("run", "copy.mlsdc", "--prompt", "x", cwd=tmp_path)


def test_changed_byte_in_the_weights_is_found_by_verify(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.mlsdc"
    shutil.copytree(tiny, copy)
    with (copy / "weights" / "target.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert "weights/target.safetensors: sha256" in mlsdc("verify", "copy.mlsdc", cwd=tmp_path)


@pytest.mark.model
def test_gguf_cut_short(smollm2_gguf: Path, tmp_path: Path) -> None:
    with smollm2_gguf.open("rb") as whole:
        (tmp_path / "half.gguf").write_bytes(whole.read(4 << 20))
    (tmp_path / "model.yaml").write_text("target: {model: half.gguf}")
    assert "half.gguf: " in mlsdc("compile", "model.yaml", "-o", "a.mlsdc", cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half.gguf", "model.yaml"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hardware=h300", "--set: hardware: 'h300' is not a target; targets are cpu-native, "),
        ("hardware=[h100, cpu, tpu]", "--set: hardware: 'tpu' is not a target; targets are cpu-native, "),
        ("passes.disable=[fuse-all]", "passes.disable: 'fuse-all' is not a pass"),
        ("limits.max_model_len=4096", "--set: limits.max_model_len: 4096, but the model was trained for at most 256 tokens"),
        ("target.kv={dtype: int8, skip_layers: [0, 2]}",
         "--set: target.kv.skip_layers: there is no layer 2: the model has 2, counted from 0"),
        ("target.model=nowhere", "'nowhere' does not exist; a model is a .gguf or .onnx file"),
    ],
)
def test_config_that_does_not_fit_the_model(tiny_yaml: Path, tmp_path: Path, override: str, message: str) -> None:
    assert mlsdc("compile", str(tiny_yaml), "-o", "a.mlsdc", "--set", override, cwd=tmp_path).startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fills_up_while_packing_leaves_the_old_artifact(tiny: Path, tiny_yaml: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands in for a full disk: kernels fit under it, weights do not."""
    shutil.copytree(tiny, tmp_path / "a.mlsdc")
    before = hash_files(tmp_path)
    largest = max((path.stat().st_size for path in tiny.rglob("*") if "weights" not in path.parts), default=0)
    limit = (largest + (tiny / "weights" / "target.safetensors").stat().st_size) // 2
    small = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    message = mlsdc("compile", str(tiny_yaml), "-o", "a.mlsdc", cwd=tmp_path, before=small)
    assert message == "a.mlsdc: packing stopped, nothing was written: File too large"
    assert hash_files(tmp_path) == before
