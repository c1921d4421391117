"""Building an ONNX graph: names, constants, the sizes of values, and the file's types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.types import DType, Size, TensorType, Type

ELEMENTS = {
    DType.F32: TensorProto.FLOAT, DType.F16: TensorProto.FLOAT16, DType.BF16: TensorProto.BFLOAT16, DType.I8: TensorProto.INT8,
    DType.U8: TensorProto.UINT8, DType.I32: TensorProto.INT32, DType.I64: TensorProto.INT64, DType.BOOL: TensorProto.BOOL,
}  # fmt: skip
PACKED = TensorProto.INT8  # how packed values (q8, a8, ...) are declared; their layout is the op's affair


class Emit:
    """ONNX nodes in order. A value is its ONNX name; values of the IR keep theirs, what lies between is named after the node it is for."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.node: Node
        self._count = 0
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def start(self, node: Node) -> None:
        """From now on nodes are for this IR node."""
        self.node, self._count = node, 0

    def op(self, kind: str, *inputs: str, out: str | None = None, domain: str = "", **attributes: Any) -> str:
        """Append one ONNX node; its output is `out`, or a fresh name."""
        name = out or self._fresh()
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, domain=domain, doc_string=self.node.origin, **attributes))
        return name

    def second(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Append one ONNX node of two outputs; the second one."""
        first, second = self._fresh(), self._fresh()
        self.nodes.append(helper.make_node(kind, inputs, [first, second], name=second, doc_string=self.node.origin, **attributes))
        return second

    def result(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """The node that makes the IR value itself."""
        return self.op(kind, *inputs, out=self.node.name, **attributes)

    def constant(self, values: Any, dtype: Any) -> str:
        """An initializer, shared by equal ones."""
        array = np.asarray(values, dtype)
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = f"constant.{len(self._constants)}"
            self.initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def sizes(self, *values: int) -> str:
        """i64[n]: what axes, shapes and bounds are given as."""
        return self.constant(values, np.int64)

    def like(self, value: float, name: str) -> str:
        """A scalar constant of the dtype of an IR value."""
        type_ = self.type(name)
        integers = {DType.I32: np.int32, DType.I64: np.int64}
        return self.constant(value, integers.get(type_.dtype, np.float32))

    def type(self, name: str) -> TensorType:
        """The type of an IR value that is a tensor."""
        type_ = self.graph[name].type
        assert isinstance(type_, TensorType)
        return type_

    def static(self, name: str, axis: int) -> int:
        """A size of an IR value that is not symbolic."""
        size = self.type(name).shape[axis]
        assert isinstance(size, int)
        return size

    def slice(self, value: str, axis: int, start: int, end: int, out: str | None = None) -> str:
        return self.op("Slice", value, self.sizes(start), self.sizes(end), self.sizes(axis), out=out)

    def _fresh(self) -> str:
        self._count += 1
        return f"{self.node.name}/{self._count}"


def value_info(name: str, type_: Type) -> onnx.ValueInfoProto:
    """A graph input or output. What is no tensor (cache, tree) is declared as bytes."""
    if not isinstance(type_, TensorType):
        return helper.make_tensor_value_info(name, TensorProto.UINT8, [f"{name}_bytes"], doc_string=str(type_))
    return helper.make_tensor_value_info(name, ELEMENTS.get(type_.dtype, PACKED), dims(type_.shape), doc_string=str(type_))


def dims(shape: Sequence[Size]) -> list[int | str]:
    return [size if isinstance(size, int) else size.name for size in shape]
