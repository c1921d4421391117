"""Reading safetensors files: the header and mapped tensors, bf16 included (which numpy lacks)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlsdc.compiler.capture.mapped import Mapped
from mlsdc.compiler.capture.source import checked
from mlsdc.compiler.errors import CaptureError

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F64": np.dtype("<f8")}
_STORED: dict[str, np.dtype[Any]] = {  # elements that mean nothing without other tensors: `stored` gives them
    "F8_E4M3": np.dtype("u1"), "U8": np.dtype("u1"), "I8": np.dtype("i1"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8")}


class SafetensorsFile:
    """Tensors of one file. Raises CaptureError for a header that does not fit the file."""

    def __init__(self, path: Path) -> None:
        self.where = path.name
        try:
            self._file = Mapped(path)
        except (OSError, ValueError) as error:
            raise CaptureError(f"{self.where}: cannot be read: {error}") from None
        self._bytes = self._file.bytes
        length = int.from_bytes(bytes(self._bytes[:8]), "little")
        if len(self._bytes) < 8 or length > len(self._bytes) - 8:
            raise CaptureError(f"{self.where}: header of {length} bytes, the file has {len(self._bytes)}: it was cut short; fetch it again")
        try:
            header = json.loads(bytes(self._bytes[8 : 8 + length]))
            header.pop("__metadata__", None)
            self._start = 8 + length
            self._tensors: dict[str, tuple[str, tuple[int, ...], int, int]] = {
                name: (info["dtype"], tuple(info["shape"]), *info["data_offsets"]) for name, info in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CaptureError(f"{self.where}: not a safetensors file ({type(error).__name__}: {error})") from None
        for name, (dtype, shape, begin, end) in self._tensors.items():
            self._check(name, dtype, shape, begin, end)

    def _check(self, name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> None:
        have, last = len(self._bytes), self._start + end
        if last > have:
            raise CaptureError(f"{self.where}: tensor '{name}' ends at byte {last}, the file has {have}: it was cut short; fetch it again")
        known = (_DTYPES | _STORED).get(dtype)
        if known is not None and end - begin != int(np.prod(shape, dtype=object)) * known.itemsize:
            raise CaptureError(f"{self.where}: tensor '{name}' of {dtype}{list(shape)} takes {end - begin} bytes; the file is corrupt")

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][1]

    def dtype(self, name: str) -> str:
        return self._tensors[name][0]

    def stored(self, name: str) -> NDArray[Any]:
        """The elements without conversion: bf16 as u16, F8_E4M3 as u8."""
        dtype, shape, begin, end = self._tensors[name]
        known = (_DTYPES | _STORED).get(dtype)
        if known is None:
            raise CaptureError(f"{self.where}: tensor '{name}' has dtype {dtype}; known are {', '.join((*_DTYPES, *_STORED))}")
        values: NDArray[Any] = np.array(self._bytes[self._start + begin : self._start + end]).view(known).reshape(shape)
        self._file.forget()
        return values

    def read(self, name: str) -> NDArray[np.float32]:
        dtype, shape, begin, end = self._tensors[name]
        if dtype not in _DTYPES:
            raise CaptureError(f"{self.where}: tensor '{name}' has dtype {dtype}; known are {', '.join(_DTYPES)}")
        stored = self._bytes[self._start + begin : self._start + end].view(_DTYPES[dtype]).reshape(shape)
        if dtype == "BF16":
            wide = stored.astype(np.uint32)
            wide <<= 16
            values = wide.view(np.float32)
        else:
            values = stored.astype(np.float32)
        self._file.forget()
        return checked(values, self.where, name)
