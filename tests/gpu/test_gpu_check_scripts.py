"""examples/gpu-check: what prepare.sh compiles and run.sh asks for, both run as they stand with an `mlsdc` that notes what it is asked, and
every command they gave taken by the real one: compiles up to the compile, checks on the fake driver with tiny artifacts in place of theirs.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mlsdc.compiler import driver
from mlsdc.compiler.cli import main
from mlsdc.compiler.config import Config
from mlsdc.runtime.device import cuda_driver
from tests.gpu.fake_cuda import FakeCuda

MLSDC = """#!/bin/sh
for word in "$@"; do printf '%s\\t' "$word"; done >> "$NOTES"
echo >> "$NOTES"
case "$*" in *"${WRONG:-nothing}.mlsdc"*) exit 1;; esac
"""




class Scripts:
    def __init__(self, folder: Path, tmp_path: Path) -> None:
        self.folder, self.notes, self.artifacts = folder, tmp_path / "notes", tmp_path / "prepared"
        tool = tmp_path / "bin" / "mlsdc"
        tool.parent.mkdir()
        tool.write_text(MLSDC)
        tool.chmod(0o755)
        self.environment = {"PATH": f"{tool.parent}:{os.environ['PATH']}", "NOTES": str(self.notes)}

    def run(self, name: str, *args: str, wrong: str = "nothing") -> tuple[int, list[list[str]]]:
        """The exit code and what `mlsdc` was asked."""
        self.notes.write_text("")
        done = subprocess.run(["sh", self.folder / name, *args], env=self.environment | {"WRONG": wrong})
        return done.returncode, [line.split("\t")[:-1] for line in self.notes.read_text().splitlines()]

    def prepare(self) -> list[list[str]]:
        code, asked = self.run("prepare.sh", "h200", str(self.artifacts))
        assert code == 0
        return asked

    def check(self) -> list[list[str]]:
        code, asked = self.run("run.sh", str(self.artifacts))
        assert code == 0
        return asked


@pytest.fixture
def scripts(root: Path, tmp_path: Path) -> Scripts:
    return Scripts(root / "examples" / "gpu-check", tmp_path)


def after(words: Sequence[str], option: str) -> str | None:
    return words[words.index(option) + 1] if option in words else None


def test_what_is_prepared_is_what_is_checked(scripts: Scripts) -> None:
    prepared = [str(after(words, "-o")) for words in scripts.prepare()]
    for name in prepared:
        Path(name).mkdir()
    checked = {word for words in scripts.check() for word in words if word.endswith(".mlsdc")}
    assert len(prepared) == 10
    assert checked == set(prepared)


def test_what_only_hopper_has_is_left_out_elsewhere(scripts: Scripts) -> None:
    code, asked = scripts.run("prepare.sh", "a100", str(scripts.artifacts))
    assert code == 0
    assert len(asked) == 9
    assert not any("tma" in word for words in [*asked, *scripts.check()] for word in words)


def test_a_check_that_fails_leaves_the_others_alone_and_is_told(scripts: Scripts) -> None:
    code, asked = scripts.run("run.sh", str(scripts.artifacts), wrong="needle-int8")
    assert code == 1
    assert asked == scripts.check()


def test_a_compile_that_fails_stops_the_others(scripts: Scripts) -> None:
    code, asked = scripts.run("prepare.sh", "h200", str(scripts.artifacts), wrong="needle-int8")
    assert code != 0
    assert str(after(asked[-1], "-o")).endswith("needle-int8.mlsdc")


def test_every_compile_is_of_a_config_as_its_name_says(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Config] = {}

    def note(config: Config, output: Path, **_: Any) -> None:
        seen[output.stem] = config

    monkeypatch.setattr(driver, "compile_model", note)
    for words in scripts.prepare():
        assert main([*words, *(["--no-cache"] if "--no-cache" not in words else [])]) == 0
    formats = {name.rpartition("-")[2]: config.target.kv.format for name, config in seen.items() if not name.startswith("smollm2")}
    assert formats == {name: name for name in ("bf16", "fp8", "int8", "int4")}
    assert [name for name, config in seen.items() if config.kernels.linear == "tma"] == ["smollm2-tma"]
    assert {name: config.hardware for name, config in seen.items()} == {
        name: "cpu-x86-64-v3" if name == "smollm2-cpu" else "h200" for name in seen}


def test_every_check_writes_a_file_that_says_what_is_wrong_with_a_card_that_computes_nothing(
        scripts: Scripts, tiny_gpu: Path, tiny_cpu: Path, levels_folder: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cuda_driver, "load_library", FakeCuda)
    for name in (str(after(words, "-o")) for words in scripts.prepare()):
        Path(name).symlink_to(levels_folder / "levels.mlsdc" if "int4" in name else tiny_cpu if "cpu" in name else tiny_gpu)
    asked = [words for words in scripts.check() if words[:2] == ["bench", "gpu-check"]]
    assert len({after(words, "--json") for words in asked}) == len(asked) >= 8
    for words in asked:
        assert main(words) == 1
        said, file, reference = capsys.readouterr().out, Path(str(after(words, "--json"))), after(words, "--reference")
        assert file.stem.startswith(Path(words[2]).stem)
        found = json.loads(file.read_text(), parse_constant=no_number)
        assert found["passed"] is False
        assert (found["numerics"] is not None) == (reference is not None) == ("numerics    WRONG" in said)
        assert not all(kernel["passed"] for kernel in found["by_kernel"])
        for name in ("gpu", "target", "cuda", "copy_bytes_s", "steps", "kernels", "by_kernel", "needles", "peers", "notes"):
            assert found[name] or name == "peers"


def no_number(text: str) -> NoReturn:
    raise AssertionError(f"{text} is no JSON")
