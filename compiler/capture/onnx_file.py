"""An ONNX file, opened and checked: its graph, and its tensors (external data too) read one at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from mlsdc.compiler.capture.source import Blocks, checked
from mlsdc.compiler.errors import CaptureError

OPSETS = range(13, 25)  # of the standard domain; com.microsoft's operators have one version
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
BITS = {TensorProto.BFLOAT16: 16, TensorProto.INT4: 4, TensorProto.UINT4: 4}


@dataclass(frozen=True)
class NBits:
    """A weight of MatMulNBits: codes u8[n, k / block, block bits / 8], scales [n k / block], maybe zero points; value scale (q - zero)."""

    codes: str
    scales: str
    zeros: str
    n: int
    k: int
    bits: int
    block: int


@dataclass
class OnnxFile:
    """The model at `path`; also the weight source of its initializers. `packed` are weights of MatMulNBits, by a name of their own."""

    path: Path
    model: onnx.ModelProto
    initializers: dict[str, TensorProto]
    opset: int
    packed: dict[str, NBits] = field(default_factory=dict)

    @staticmethod
    def open(path: Path) -> OnnxFile:
        """Raises CaptureError for no ONNX model, an opset out of range, and external data that is missing or cut short."""
        try:
            model = onnx.load(str(path), load_external_data=False)
        except OSError as error:
            raise CaptureError(f"{path.name}: cannot be read: {error.strerror or error}") from None
        except Exception as error:  # protobuf's DecodeError has no name that is the same everywhere
            raise CaptureError(f"{path.name}: not an ONNX model ({type(error).__name__})") from None
        version = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
        if not model.graph.node or version not in OPSETS:
            raise CaptureError(f"{path.name}: opset {version}; models of opset {OPSETS[0]} to {OPSETS[-1]} can be read")
        file = OnnxFile(path, model, {tensor.name: tensor for tensor in model.graph.initializer}, version)
        for tensor in file.initializers.values():
            file._check(tensor)
        return file

    def _check(self, tensor: TensorProto) -> None:
        if not external_data_helper.uses_external_data(tensor):
            return
        info = external_data_helper.ExternalDataInfo(tensor)
        data = self.path.parent / info.location
        if Path(info.location).is_absolute() or ".." in Path(info.location).parts:
            raise CaptureError(f"{self.path.name}: tensor '{tensor.name}' names external data '{info.location}' outside of its folder")
        if not data.is_file():
            raise CaptureError(f"{self.path.name}: external data file '{info.location}' is missing (tensor '{tensor.name}')")
        needed = (info.offset or 0) + self._bytes(tensor)
        if data.stat().st_size < needed:
            size = data.stat().st_size
            raise CaptureError(f"{info.location}: cut short: tensor '{tensor.name}' ends at byte {needed}, the file has {size}")

    def _bytes(self, tensor: TensorProto) -> int:
        count = math.prod(int(size) for size in tensor.dims)
        bits = BITS.get(tensor.data_type) or 8 * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
        return -(-count * bits // 8)

    def array(self, name: str) -> NDArray[Any]:
        """An initializer as numpy holds it; every float type as f32."""
        tensor = self.initializers[name]
        if external_data_helper.uses_external_data(tensor):
            info = external_data_helper.ExternalDataInfo(tensor)
            size = self._bytes(tensor)
            raw = np.memmap(self.path.parent / info.location, np.uint8, "r", info.offset or 0, size) if size else np.zeros(0, np.uint8)
            whole = TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=raw.tobytes())
            tensor = whole
        values: NDArray[Any] = numpy_helper.to_array(tensor)
        return values.astype(np.float32) if tensor.data_type in FLOATS else values

    # WeightSource

    def names(self) -> tuple[str, ...]:
        return (*self.initializers, *self.packed)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.packed:
            return self.packed[name].n, self.packed[name].k
        if name not in self.initializers:
            raise CaptureError(f"{self.path.name}: has no tensor '{name}'")
        return tuple(int(size) for size in self.initializers[name].dims)

    def read(self, name: str) -> NDArray[np.float32]:
        self.shape(name)
        values = self._unpacked(self.packed[name]) if name in self.packed else self.array(name)
        return checked(np.ascontiguousarray(values, np.float32), self.path.name, name)

    def block(self, name: str) -> Blocks | None:
        self.shape(name)
        return None

    def _unpacked(self, w: NBits) -> NDArray[np.float32]:
        groups = -(-w.k // w.block)
        codes = nibbles(self.array(w.codes).reshape(w.n, groups, -1), w.bits)[..., : w.block].astype(np.float32)
        scales = self.array(w.scales).reshape(w.n, groups, 1)
        zero: NDArray[Any] = np.float32(1 << (w.bits - 1))  # type: ignore[assignment]
        if w.zeros:
            zeros = self.array(w.zeros)
            packed = zeros.dtype == np.uint8
            zero = (nibbles(zeros.reshape(w.n, -1), w.bits)[:, :groups] if packed else zeros).reshape(w.n, groups, 1).astype(np.float32)
        values: NDArray[np.float32] = ((codes - zero) * scales).reshape(w.n, -1)[:, : w.k]
        return values


def nibbles(codes: NDArray[Any], bits: int) -> NDArray[Any]:
    """Along the last axis: bytes as they are, or two codes a byte, the low one first."""
    if bits == 8:
        return codes
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def attributes(node: onnx.NodeProto) -> Mapping[str, Any]:
    def plain(value: Any) -> Any:
        return value.decode() if isinstance(value, bytes) else value

    return {attribute.name: plain(helper.get_attribute_value(attribute)) for attribute in node.attribute}
