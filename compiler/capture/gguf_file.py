"""Reading a GGUF file's header: metadata and where each tensor lies. The tensors stay memory-mapped.

Every length is checked against the file before it is used, so a file cut short is an error here and not a bus error later.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlsdc.compiler.capture.gguf_blocks import GGML_TYPES, BlockType
from mlsdc.compiler.capture.mapped import Mapped
from mlsdc.compiler.errors import CaptureError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_STRING = 1 << 26  # a chat template is kilobytes; more is a corrupt length


@dataclass(frozen=True)
class GgufTensor:
    """`shape` is logical, rows first (the file stores it reversed); `offset` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int
    num_bytes: int


class GgufFile:
    """`metadata` by key and `tensors` by ggml name. Raises CaptureError for anything that is not a whole GGUF file."""

    def __init__(self, path: Path) -> None:
        self.where = path.name
        try:
            self._file = Mapped(path)
        except (OSError, ValueError) as error:
            raise CaptureError(f"{self.where}: cannot be read: {error}") from None
        self._bytes = self._file.bytes
        self._buffer = memoryview(self._bytes)  # type: ignore[arg-type]  # numpy arrays are buffers
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._parse()

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes, mapped; those of the tensors before it are given back."""
        self._file.forget()
        tensor = self.tensors[name]
        return self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]

    def _parse(self) -> None:
        if bytes(self._buffer[:4]) != b"GGUF":
            raise CaptureError(f"{self.where}: not a GGUF file (it starts with {bytes(self._buffer[:4])!r})")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise CaptureError(f"{self.where}: GGUF version {version}, versions 2 and 3 can be read")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", 32))
        if alignment < 1:
            raise CaptureError(f"{self.where}: alignment {alignment} is not positive")
        start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in infos:
            if kind not in GGML_TYPES:
                known = ", ".join(type_.name for type_ in GGML_TYPES.values())
                raise CaptureError(f"{self.where}: tensor '{name}' has ggml type {kind}; known are {known}")
            type_ = GGML_TYPES[kind]
            if shape[-1] % type_.block:
                raise CaptureError(f"{self.where}: tensor '{name}' has rows of {shape[-1]}, {type_.name} blocks have {type_.block}")
            num_bytes = int(np.prod(shape, dtype=object)) // type_.block * type_.num_bytes
            end = start + offset + num_bytes
            if end > len(self._bytes):
                have = len(self._bytes)
                raise CaptureError(f"{self.where}: tensor '{name}' ends at byte {end}, the file has {have}: cut short; fetch it again")
            self.tensors[name] = GgufTensor(name, shape, type_, start + offset, num_bytes)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        if not name.isprintable():
            raise CaptureError(f"{self.where}: a tensor's name at byte {self._at} is {name!r:.80}; the file is corrupt")
        rank = self._scalar("I")
        if not 1 <= rank <= 4:
            raise CaptureError(f"{self.where}: tensor '{name}' has rank {rank}, expected 1 to 4")
        shape = tuple(self._scalar("Q") for _ in range(rank))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise CaptureError(f"{self.where}: metadata value of type {kind} at byte {self._at}, expected 0 to 12")
        inner, count = self._scalar("I"), self._scalar("Q")
        if inner in _SCALARS:
            size = struct.calcsize(_SCALARS[inner])
            taken = self._take(count * size)
            return list(struct.unpack(f"<{count}{_SCALARS[inner]}", taken))
        if count > len(self._bytes):
            raise CaptureError(f"{self.where}: array of {count} values at byte {self._at}; the file is corrupt")
        return [self._value(inner) for _ in range(count)]

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        length = self._scalar("Q")
        if length > _MAX_STRING:
            raise CaptureError(f"{self.where}: string of {length} bytes at byte {self._at}; the file is corrupt")
        return str(self._take(length), "utf-8", "replace")

    def _take(self, size: int) -> memoryview:
        if self._at + size > len(self._buffer):
            raise CaptureError(f"{self.where}: the header ends at byte {len(self._buffer)}: the file was cut short; fetch it again")
        taken = self._buffer[self._at : self._at + size]
        self._at += size
        return taken
