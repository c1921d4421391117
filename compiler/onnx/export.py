"""A graph as an ONNX file.

    export_onnx(graph, Path("model.onnx"), weights)

Ops with a meaning in ONNX become standard operators of OPSET; the others (cache, tree, packed weights) become nodes of DOMAIN with their
attributes, which Netron shows and no runtime runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from mlsdc.compiler.errors import MlsdcError
from mlsdc.compiler.graph import Graph, Input, Node, Weight
from mlsdc.compiler.onnx.emit import Emit, value_info
from mlsdc.compiler.onnx.standard import RULES
from mlsdc.compiler.types import Dim, TensorType

OPSET, DOMAIN = 20, "mlsdc"
INLINE_BYTES = 1 << 30  # more than this of weights lies in a file beside the model: protobuf ends at 2 GiB
WeightReader = Callable[[Node], npt.NDArray[Any]]


def to_onnx(graph: Graph, weights: WeightReader | None = None) -> onnx.ModelProto:
    """The graph as a model. Without `weights`, weights are inputs of the ONNX graph; with them, initializers (but for packed ones)."""
    e = Emit(graph)
    inputs = []
    for node in graph:
        e.start(node)
        if isinstance(node.op, Input) or (isinstance(node.op, Weight) and not stored(node, weights)):
            inputs.append(value_info(node.name, node.type))
        elif isinstance(node.op, Weight):
            assert weights is not None
            e.initializers.append(numpy_helper.from_array(np.ascontiguousarray(weights(node), np.float32), node.name))
        elif is_standard(graph, node):
            RULES[type(node.op)](e, node.op, node.inputs)
        else:
            e.result(node.op.opname, *node.inputs, domain=DOMAIN, **attributes(node))
    outputs = []
    for result, value in graph.outputs:
        if result != value:
            result = f"{result}.out" if result in graph.by_name else result  # ONNX has one name space: the cache comes in as `kv`
            e.start(dataclasses.replace(graph[value], name=result, origin=""))
            e.result("Identity", value)
        outputs.append(value_info(result, graph[value].type))
    made = helper.make_graph(e.nodes, graph.name, inputs, outputs, e.initializers)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=9, producer_name="mlsdc")


def export_onnx(graph: Graph, path: Path, weights: WeightReader | None = None) -> None:
    """Write the graph, and weights beyond INLINE_BYTES to `path`.data beside it; both pass onnx.checker. Raises MlsdcError."""
    model = to_onnx(graph, weights)
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    try:
        if size > INLINE_BYTES:
            onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
        else:
            onnx.save(model, path)
        onnx.checker.check_model(str(path), full_check=size <= INLINE_BYTES)
    except OSError as error:
        raise MlsdcError(f"{path}: cannot be written: {error.strerror or error}") from None
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise MlsdcError(f"graph '{graph.name}': onnx refuses it: {str(error).splitlines()[0]}") from None


def stored(node: Node, weights: WeightReader | None) -> bool:
    """Whether a weight's values can stand in the file: they are plain numbers, and there is something to read them from."""
    return weights is not None and isinstance(node.type, TensorType) and not node.type.dtype.packed


def is_standard(graph: Graph, node: Node) -> bool:
    """The op has a rule, and none of its values is packed."""
    types = [graph[name].type for name in node.inputs]
    return type(node.op) in RULES and all(isinstance(t, TensorType) and not t.dtype.packed for t in (node.type, *types))


def attributes(node: Node) -> dict[str, Any]:
    """An op's fields as ONNX attributes: numbers and lists as they are, the rest as text."""
    found = {field.name: getattr(node.op, field.name) for field in dataclasses.fields(node.op)}
    kept = {name: int(value) if isinstance(value, bool) else value for name, value in found.items() if value != ()}
    plain = (int, float, str, tuple)
    return {name: str(value) if isinstance(value, Dim) or not isinstance(value, plain) else value for name, value in kept.items()}
