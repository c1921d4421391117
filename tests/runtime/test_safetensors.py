"""The memory-mapped reader."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.safetensors import SafetensorsFile, header_bytes


def write(path: Path, header: dict[str, object], data: bytes) -> Path:
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_are_read_where_they_lie(tmp_path: Path) -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.int8)
    path = write(tmp_path / "w", {"a": entry("F32", [2, 3], 0, 24), "b": entry("I8", [4], 64, 68)}, a.tobytes() + bytes(40) + b.tobytes())
    file = SafetensorsFile(path)
    assert np.array_equal(file.tensor("a"), a)
    assert np.array_equal(file.tensor("b"), b)


def test_tensors_are_views_of_the_map_at_64_bytes(tmp_path: Path) -> None:
    file = SafetensorsFile(write(tmp_path / "w", {"a": entry("U8", [64], 0, 64)}, bytes(64)))
    tensor = file.tensor("a")
    assert tensor.ctypes.data % 64 == 0
    assert not tensor.flags.owndata
    assert not tensor.flags.writeable


def test_the_official_library_agrees(tmp_path: Path) -> None:
    official = pytest.importorskip("safetensors.numpy")
    tensors = {"x": np.random.default_rng(0).normal(size=(3, 5)).astype(np.float16), "y": np.array([1, 2], np.int64)}
    official.save_file(tensors, tmp_path / "w", metadata={"k": "v"})
    file = SafetensorsFile(tmp_path / "w")
    assert file.metadata == {"k": "v"}
    assert all(np.array_equal(file.tensor(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(("header", "message"), [
    ({"a": entry("F99", [1], 0, 4)}, "a has dtype F99"), ({"a": entry("F32", [2], 0, 4)}, r"a has shape \[2\] F32 but 4 bytes"),
    ({"a": entry("F32", [100], 0, 400)}, "cut short"),
    ({"a": entry("F32", [0], -8, -8)}, "a lies at"), ({"a": 3}, "not a safetensors header"),
    ({"a": {"dtype": "F32"}}, "not a safetensors header"),
])
def test_a_header_that_lies_is_refused(tmp_path: Path, header: dict[str, object], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        SafetensorsFile(write(tmp_path / "w", header, bytes(8)))


@pytest.mark.parametrize("size", [0, 4, 8, 20])
def test_a_file_cut_in_its_header_is_refused(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "w", {"a": entry("U8", [64], 0, 64)}, bytes(64))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ArtifactError, match="w: "):
        header_bytes(path)
