"""Packing: streamed, aligned, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.pack import check_output, check_space, hash_files, staged, weights_header, write_text, write_weights
from mlsdc.runtime.safetensors import SafetensorsFile, header_sha256

SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=5)


def bytes_of(name: str, size: int) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@given(SIZES)
def test_every_tensor_starts_at_64_bytes_and_reads_back(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    path = tmp_path_factory.mktemp("w") / "w.safetensors"
    tensors = [(f"w.{i}", size) for i, size in enumerate(sizes)]
    write_weights(path, tensors, lambda name: bytes_of(name, dict(tensors)[name]))
    file = SafetensorsFile(path)
    for name, size in tensors:
        assert file.tensors[name].begin % 64 == 0
        stored = file.tensor(name)
        assert np.array_equal(stored[:size], bytes_of(name, size))
        assert not stored[size:].any()


def test_other_readers_understand_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_weights(path, [("a", 100), ("b", 64)], lambda name: np.ones({"a": 100, "b": 64}[name], np.uint8))
    loaded = load_file(path)
    assert {name: tensor.size for name, tensor in loaded.items()} == {"a": 128, "b": 64}


def test_hashes_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    written = write_weights(path, [("a", 100)], lambda name: np.ones(100, np.uint8))
    assert written.num_bytes == path.stat().st_size
    assert written.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert written.header_sha256 == header_sha256(path)


@given(SIZES)
def test_header_is_json_padded_with_spaces_to_64_bytes(sizes: list[int]) -> None:
    header = weights_header([(f"w.{i}", size) for i, size in enumerate(sizes)])
    assert len(header) % 64 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert len(json.loads(header[8:])) == len(sizes)


def test_finished_folder_takes_its_place(tmp_path: Path) -> None:
    with staged(tmp_path / "a.mlsdc") as folder:
        write_text(folder, "program/x.json", "{}")
    assert hash_files(tmp_path) == {"a.mlsdc/program/x.json": hashlib.sha256(b"{}").hexdigest()}


def test_new_artifact_replaces_an_old_one_whole(tmp_path: Path) -> None:
    for name in ("old", "new"):
        with staged(tmp_path / "a.mlsdc") as folder:
            write_text(folder, "manifest.json", name)
            write_text(folder, f"{name}.txt", "")
    assert sorted(path.name for path in (tmp_path / "a.mlsdc").iterdir()) == ["manifest.json", "new.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.mlsdc"]


def interrupted(output: Path, error: BaseException) -> None:
    with staged(output) as folder:
        write_text(folder, "half", "written")
        raise error


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_any_error_leaves_the_old_artifact_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    with staged(tmp_path / "a.mlsdc") as folder:
        write_text(folder, "manifest.json", "old")
    before = hash_files(tmp_path)
    with pytest.raises((type(error), CompileError)):
        interrupted(tmp_path / "a.mlsdc", error)
    assert hash_files(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.mlsdc"]


def test_full_disk_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"^a.mlsdc: packing stopped, nothing was written: No space left on device$"):
        interrupted(tmp_path / "a.mlsdc", OSError(errno.ENOSPC, "No space left on device"))


def test_folder_with_other_things_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("")
    with pytest.raises(CompileError, match="not an artifact"):
        check_output(tmp_path)


def test_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.mlsdc").write_text("")
    with pytest.raises(CompileError, match="not an artifact"):
        check_output(tmp_path / "a.mlsdc")


def test_missing_parent_is_named(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="does not exist"):
        check_output(tmp_path / "no" / "a.mlsdc")


def test_leftovers_of_a_killed_compile_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.mlsdc.partial-1").mkdir()
    (tmp_path / ".a.mlsdc.partial-1" / "half").write_text("")
    with staged(tmp_path / "a.mlsdc"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["a.mlsdc"]


def test_folder_of_a_compile_that_still_runs_is_left_alone(tmp_path: Path) -> None:
    with staged(tmp_path / "a.mlsdc") as folder:
        (folder / "half").write_text("")
        folder.rename(other := folder.with_name(".a.mlsdc.partial-0"))
        with staged(tmp_path / "a.mlsdc"):
            assert (other / "half").exists()
        other.rename(folder)


def test_little_space_is_told_before_work_starts(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="bytes are free, packing needs about"):
        check_space(tmp_path, 2**62)
