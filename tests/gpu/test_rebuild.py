"""A whole artifact for a GPU, levels with programs and a grouped cache in it: the same bytes wherever and whenever it is compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.levels.ngram_ahead import kernels
from mlsdc.targets import cubin
from mlsdc.targets.hardware import GPUS

SIZES = {"null": 8, "i32": 4, "f32": 4}


@pytest.fixture(scope="module")
def artifact(levels_folder: Path) -> Artifact:
    return Artifact.open(levels_folder / "levels.mlsdc")


def test_it_is_compiled_to_the_same_bytes_again(artifact: Artifact, levels_folder: Path, root: Path, tmp_path: Path) -> None:
    """By another process, that hashes otherwise, in another folder, with no cached kernel."""
    (tmp_path / "deeper").mkdir()
    for name in ("model", "small", *(path.name for path in levels_folder.glob("*.safetensors")), "model.yaml"):
        source = levels_folder / name
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, tmp_path / "deeper" / name)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONHASHSEED": "7"}
    files = [str(tmp_path / "deeper" / "model.yaml"), "-o", str(tmp_path / "again.mlsdc")]
    command = [sys.executable, "-m", "mlsdc.compiler.cli", "compile", *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    again = Artifact.open(tmp_path / "again.mlsdc")
    assert again.manifest == artifact.manifest  # it holds the hash of every file
    assert again.sha256 == artifact.sha256
    assert len(again.verify()) > 100


def test_arguments_of_every_kernel_are_the_parameter_table_of_its_cubin(artifact: Artifact) -> None:
    (target,) = artifact.manifest.targets
    assert {key.partition("_")[0] for key in target.kernels} >= {"attend", "quantise", "settle", "top", "linear"}
    for info in target.kernels.values():
        types = [entry.split(": ")[1] for entry in info.abi]
        table = cubin.params(artifact.path(info.file).read_bytes(), info.entry)
        assert [param.bytes for param in table] == [8 if type_.startswith("*") else SIZES[type_] for type_ in types], info.entry


def test_every_launch_gives_its_kernel_what_it_takes(artifact: Artifact) -> None:
    (target,) = artifact.manifest.targets
    used = set()
    for level in artifact.manifest.levels:
        for program in artifact.programs(level.name, target).values() if level.programs else ():
            for launch in program.launches:
                info = target.kernels[launch.kernel]
                assert len(launch.args) == sum(not entry.endswith(": null") for entry in info.abi), launch.node
                used.add(launch.kernel)
    (counts,) = (level for level in artifact.manifest.levels if level.kind == "ngram")
    assert used | set(kernels(int(counts.params["order"]))) == set(target.kernels)  # those of counts are no program's


def test_no_kernel_spills(artifact: Artifact) -> None:
    (target,) = artifact.manifest.targets
    for info in target.kernels.values():
        assert info.resources["stack_bytes"] == 0
        assert info.resources["shared_bytes"] <= GPUS["h100"].shared_bytes
