"""Writing an artifact: aside, streamed, hashed, and renamed into place when it is whole (law L6).

Same inputs give the same bytes: nothing here knows the time, the machine or a path outside of the artifact.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.errors import CompileError
from mlsdc.runtime.errors import MlsdcError

ALIGNMENT = 64
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class WeightFile:
    """What the manifest says of a weight file. `header_sha256` covers the bytes before the first tensor."""

    num_bytes: int
    sha256: str
    header_sha256: str


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A fresh folder beside `output` that takes its place when the block ends; on any error it is removed and `output` stays as it was.

    Raises CompileError if `output` is something else than an artifact, or when writing fails (a full disk).
    """
    output = Path(os.path.abspath(output))
    check_output(output)
    folder = output.with_name(f".{output.name}.partial-{os.getpid()}")
    _remove_stale(output)
    try:
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise CompileError(f"{output}: cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
        _sync(folder)
        _replace(folder, output)
    except OSError as error:
        raise CompileError(f"{output.name}: packing stopped, nothing was written: {_reason(error, folder)}") from error
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def check_output(output: Path) -> None:
    """Raises CompileError if an artifact cannot take the place of `output`: worth asking before minutes of work."""
    output = Path(os.path.abspath(output))
    if not output.parent.is_dir():
        raise CompileError(f"{output}: the folder {output.parent} does not exist")
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise CompileError(f"{output}: exists and is not an artifact; choose another -o or remove it")
    if output.is_dir() and any(output.iterdir()) and not (output / "manifest.json").is_file():
        raise CompileError(f"{output}: is a folder with other things in it, not an artifact; choose another -o")


def write_weights(path: Path, tensors: Sequence[tuple[str, int]], pack: Callable[[str], Bytes]) -> WeightFile:
    """Stream tensors, one in memory at a time, into a safetensors file whose every tensor starts at a multiple of 64 bytes.

    `tensors` are (name, bytes); `pack(name)` gives the bytes, which are filled up with zeros to the next multiple of 64. The stored
    tensors are U8 vectors of that padded size.
    """
    header = weights_header(tensors)
    digest = hashlib.sha256(header)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(header)
        for name, num_bytes in tensors:
            data = np.ascontiguousarray(pack(name), np.uint8).reshape(-1)
            if data.nbytes != num_bytes:
                raise MlsdcError(f"{name}: packed to {data.nbytes} bytes, the target announced {num_bytes}")
            for part in (data.data, bytes(-num_bytes % ALIGNMENT)):
                file.write(part)
                digest.update(part)
        size = file.tell()
    return WeightFile(size, digest.hexdigest(), hashlib.sha256(header).hexdigest())


def weights_header(tensors: Sequence[tuple[str, int]]) -> bytes:
    """Length word and JSON, padded with spaces so that the data starts at a multiple of 64."""
    entries, offset = {}, 0
    for name, num_bytes in tensors:
        padded = _aligned(num_bytes)
        entries[name] = {"dtype": "U8", "shape": [padded], "data_offsets": [offset, offset + padded]}
        offset += padded
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_text(folder: Path, name: str, text: str) -> str:
    """Write `folder/name`, making its folders; returns `name`."""
    return write_bytes(folder, name, text.encode("utf-8"))


def write_bytes(folder: Path, name: str, data: bytes) -> str:
    """The same for bytes."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return name


def hash_files(folder: Path, leave_out: frozenset[str] = frozenset()) -> dict[str, str]:
    """Path in the folder -> sha256 of every file, in order of the paths."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in leave_out:
            with path.open("rb") as file:
                hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def check_space(folder: Path, needed: int) -> None:
    """Raises CompileError if the disk of `folder` has less than `needed` bytes left: LLVM ends the process when it runs full."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CompileError(f"{folder}: {free} bytes are free, packing needs about {needed}")


def _remove_stale(output: Path) -> None:
    """Folders that a killed compile left: whoever still works in one holds its lock."""
    for folder in output.parent.glob(f".{glob.escape(output.name)}.partial-*"):
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def _replace(folder: Path, output: Path) -> None:
    """Rename into place. An old artifact is moved aside first and comes back if the rename fails."""
    if not output.exists():
        folder.rename(output)
        return
    old = folder.with_name(folder.name + ".old")
    output.rename(old)
    try:
        folder.rename(output)
    except BaseException:
        old.rename(output)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Everything on disk before the rename says that it is."""
    for path in [*sorted(folder.rglob("*")), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _reason(error: OSError, folder: Path) -> str:
    text = error.strerror or str(error)
    if error.filename is None:
        return text
    path = Path(os.fsdecode(error.filename))
    return f"{path.relative_to(folder) if path.is_relative_to(folder) else path}: {text}"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
