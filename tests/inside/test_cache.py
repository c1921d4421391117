"""The compile cache: what was compiled from the same bytes is copied, anything else is compiled, and nothing here fails a compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlsdc.compiler import cli
from mlsdc.compiler.cache import KEPT, cache_folder, cache_key, fetch, store
from mlsdc.compiler.config import load_config
from tests.inside.model import Tiny


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlsdc"


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_stored_artifact_comes_back_byte_for_byte(tiny: Tiny, tmp_path: Path) -> None:
    assert not fetch("key", tmp_path / "a.mlsdc")
    store("key", tiny.artifact)
    assert fetch("key", tmp_path / "a.mlsdc")
    assert files(tmp_path / "a.mlsdc") == files(tiny.artifact)


def test_a_spoiled_entry_is_no_entry(tiny: Tiny, tmp_path: Path, own_cache: Path) -> None:
    store("key", tiny.artifact)
    weights = own_cache / "key" / "weights" / "target.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    assert not fetch("key", tmp_path / "a.mlsdc")
    assert not (tmp_path / "a.mlsdc").exists()
    assert not (own_cache / "key").exists()


def test_the_key_is_of_the_config_and_of_every_byte_of_the_model(tiny: Tiny, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tiny.model, tmp_path / "tiny")
    shutil.copy(tiny.yaml, tmp_path / "model.yaml")
    first = cache_key(load_config(tiny.yaml), "cpu-x86-64-v4")
    assert cache_key(load_config(tmp_path / "model.yaml"), "cpu-x86-64-v4") == first
    assert cache_key(load_config(tmp_path / "model.yaml"), "cpu-other") != first
    assert cache_key(load_config(tmp_path / "model.yaml", ["limits.max_num_seqs=2"]), "cpu-x86-64-v4") != first
    weights = tmp_path / "tiny" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert cache_key(load_config(tmp_path / "model.yaml"), "cpu-x86-64-v4") != first


def test_the_least_recently_used_entries_go(tiny: Tiny, own_cache: Path) -> None:
    for number in range(KEPT + 2):
        store(f"key{number}", tiny.artifact)
        os.utime(own_cache / f"key{number}", (number, number))
    assert sorted(path.name for path in own_cache.iterdir()) == [f"key{number}" for number in range(2, KEPT + 2)]


def test_eight_processes_store_and_fetch_one_key_at_once(tiny: Tiny, tmp_path: Path, own_cache: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from mlsdc.compiler.cache import fetch, store\n"
        "for turn in range(3):\n    store('key', Path(sys.argv[1])); assert fetch('key', Path(sys.argv[2]))")
    running = [subprocess.Popen([sys.executable, "-c", program, str(tiny.artifact), str(tmp_path / f"{i}.mlsdc")]) for i in range(8)]
    assert [process.wait(timeout=100) for process in running] == [0] * 8
    assert [path.name for path in own_cache.iterdir()] == ["key"]
    assert all(files(tmp_path / f"{i}.mlsdc") == files(tiny.artifact) for i in range(8))


def test_a_cache_that_cannot_be_written_is_as_good_as_none(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    store("key", tiny.artifact)
    assert not fetch("key", tmp_path / "a.mlsdc")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "relative")
    assert cache_folder() is None
    store("key", tiny.artifact)


def test_compile_takes_the_cached_artifact_and_says_so_when_asked(
        tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from mlsdc.targets import native_target

    store(cache_key(load_config(tiny.yaml), native_target()), tiny.artifact)
    monkeypatch.setenv("MLSDC_LOG", "info")
    assert cli.main(["compile", str(tiny.yaml), "-o", str(tmp_path / "a.mlsdc")]) == 0
    assert "a.mlsdc: from the cache" in capsys.readouterr().err
    assert files(tmp_path / "a.mlsdc") == files(tiny.artifact)
