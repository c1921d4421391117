"""Reading safetensors files by memory map: no copy, no torch, nothing but the header is parsed.

File: u64 little-endian header length, a JSON header padded with spaces, then the tensors' bytes. An artifact's writer sizes the
header so that every tensor starts at a multiple of 64 bytes of the file, and the map starts at a page: kernels may rely on it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.step import Array

MAX_HEADER_BYTES = 100_000_000
_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `begin` and `end` are byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header_bytes(path: Path) -> bytes:
    """The length word and the JSON header: exactly the bytes before the first tensor. Raises ArtifactError if the file is cut short."""
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > MAX_HEADER_BYTES:
            raise ArtifactError(f"{path.name}: not a safetensors file (header of {length} bytes)")
        header = file.read(length)
    if len(header) < length:
        raise ArtifactError(f"{path.name}: cut short: the header wants {length} bytes, the file has {len(header)}")
    return head + header


def header_sha256(path: Path) -> str:
    """What `Manifest.weight_headers` holds: sha256 over `header_bytes`."""
    return hashlib.sha256(header_bytes(path)).hexdigest()


class SafetensorsFile:
    """A memory-mapped file; `tensor(name)` gives read-only views that keep the map alive."""

    def __init__(self, path: Path) -> None:
        """Raises ArtifactError, naming file and tensor, for anything that is not a whole safetensors file."""
        head = header_bytes(path)
        size = path.stat().st_size
        self.path = path
        try:
            raw = json.loads(head[8:])
            self.metadata: dict[str, str] = raw.pop("__metadata__", {})
            self.tensors = {name: _info(x, len(head)) for name, x in raw.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{path.name}: not a safetensors header ({type(error).__name__}: {error})") from None
        for name, info in self.tensors.items():
            if info.dtype not in _NUMPY:
                raise ArtifactError(f"{path.name}: {name} has dtype {info.dtype}; known are {', '.join(_NUMPY)}")
            if not len(head) <= info.begin <= info.end <= size:
                raise ArtifactError(f"{path.name}: {name} lies at {info.begin}..{info.end}, the file has {size} bytes: it is cut short")
            if prod(info.shape) * np.dtype(_NUMPY[info.dtype]).itemsize != info.end - info.begin:
                raise ArtifactError(f"{path.name}: {name} has shape {list(info.shape)} {info.dtype} but {info.end - info.begin} bytes")
        with path.open("rb") as file:
            self.bytes: Array = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)

    def tensor(self, name: str) -> Array:
        """A read-only view in the file's dtype; bf16 comes as its u16 bits."""
        info = self.tensors[name]
        return self.bytes[info.begin : info.end].view(_NUMPY[info.dtype]).reshape(info.shape)


def _info(raw: dict[str, list[int]], start: int) -> TensorInfo:
    begin, end = raw["data_offsets"]
    return TensorInfo(str(raw["dtype"]), tuple(int(x) for x in raw["shape"]), start + int(begin), start + int(end))
