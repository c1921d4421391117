"""What an ONNX graph computes from the sequence's length alone, recognised by evaluating it: what `lengths` is for torch's graphs.

Shapes, positions, masks and tables of angles come out of long chains of small nodes, differently from every exporter. They are run at a few
lengths, by onnx's reference implementation, for one sequence without a past.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper
from onnx.reference import ReferenceEvaluator

from mlsdc.compiler.capture.onnx_file import OnnxFile, attributes
from mlsdc.compiler.errors import CaptureError
from mlsdc.compiler.ops_capture import CausalMask

Array = NDArray[Any]
LENGTHS = (7, 33)
MOST_WINDOW = 4200
HIDDEN = -1e4  # an additive mask hides with this or less
MOST_ELEMENTS = 1 << 24  # a weight is not a value that is evaluated


class Known:
    """Values by name and length. `shape_of(value, length)` gives the shape of a value that depends on the tokens."""

    def __init__(self, file: OnnxFile, tokens: str, shape_of: Callable[[str, int], tuple[int, ...]]) -> None:
        self.file, self.tokens, self.shape_of = file, tokens, shape_of
        self.maker = {name: node for node in file.model.graph.node for name in node.output if name}
        self.inputs = {value.name: value for value in file.model.graph.input if value.name not in file.initializers}
        self._known: dict[str, bool] = {"": True}
        self._memo: dict[tuple[str, int], Array] = {}

    def known(self, name: str) -> bool:
        """Whether the value follows from the sequence's length. Raises CaptureError where it is made of itself."""
        pending, waiting = [name], set[str]()
        while pending:  # by hand: graphs are deeper than Python's stack
            top = pending[-1]
            if top in self._known:
                pending.pop()
                continue
            node = self.maker.get(top)
            if top in self.file.initializers:
                self._known[top] = True
            elif node is None or node.op_type in ("Shape", "Size", "Constant"):
                self._known[top] = top != self.tokens
            elif node.domain not in ("", "ai.onnx"):
                self._known[top] = False
            else:
                missing = [value for value in node.input if value not in self._known]
                if missing:
                    if top in waiting:
                        where = f"{self.file.path.name}: node '{node.name or node.op_type}'"
                        raise CaptureError(f"{where} makes '{top}' of itself: the graph has a cycle")
                    waiting.add(top)
                    pending.extend(missing)
                    continue
                self._known[top] = all(self._known[value] for value in node.input)
        return self._known[name]

    def at(self, name: str, length: int) -> Array:
        """The value for a sequence of `length`."""
        key = (name, length)
        if key not in self._memo:
            self._memo[key] = self._evaluate(name, length)
        return self._memo[key]

    def _evaluate(self, name: str, length: int) -> Array:
        if name in self.file.initializers:
            return self.file.array(name)
        if name in self.inputs:
            return self._given(name, length)
        node = self.maker[name]
        if node.op_type == "Shape" and not self.known(node.input[0]):
            shape = self.shape_of(node.input[0], length)
            facts = attributes(node)
            return np.array(shape[facts.get("start", 0) : facts.get("end", len(shape))], np.int64)
        inputs = {value: self.at(value, length) for value in dict.fromkeys(node.input) if value}
        if sum(value.size for value in inputs.values()) > MOST_ELEMENTS:
            raise CaptureError(f"{node.name or node.op_type}: computes with tensors too large to be anything but weights")
        return run(node, inputs, self.file.opset)[list(node.output).index(name)]

    def _given(self, name: str, length: int) -> Array:
        """Inputs beside the tokens, for one sequence without a past: its mask is all ones, its positions count from 0."""
        type_ = self.inputs[name].type.tensor_type
        dtype = helper.tensor_dtype_to_np_dtype(type_.elem_type)
        sizes = [dim.dim_value for dim in type_.shape.dim]
        if "past" in name or "cache" in name:
            return np.zeros([size or (1 if axis == 0 else 0) for axis, size in enumerate(sizes)], np.float32)
        if "position" in name:
            return np.arange(length, dtype=dtype).reshape(1, length)
        if "mask" in name:
            return np.ones((1, length), dtype)
        raise CaptureError(f"{self.file.path.name}: input '{name}' is none of input_ids, attention_mask, position_ids and past key values")

    def same(self, name: str) -> bool:
        """Whether the value is a constant."""
        short, long = (self.at(name, length) for length in LENGTHS)
        return short.shape == long.shape and np.array_equal(short, long)

    def positions(self, name: str) -> bool:
        """0, 1, 2, ... along the one axis that is not of size 1."""
        return all(self.at(name, n).size == n and np.array_equal(self.at(name, n).reshape(-1), np.arange(n)) for n in LENGTHS)

    def mask(self, name: str, *, hidden: bool = False) -> CausalMask | None:
        """The causal mask with these values; `hidden`: for a bool that is true where a key is *not* seen."""
        for length in LENGTHS:
            value = self.at(name, length)
            if value.shape[-2:] != (length, length) or value.size != length * length:
                return None
        windows = [n for n in sorted(self._numbers(name)) if 1 < n <= MOST_WINDOW]
        lengths = (*LENGTHS, *(n + 8 for n in windows[-2:]))
        additive = self.at(name, LENGTHS[0]).dtype != np.bool_
        for window in (0, *windows, *(n + 1 for n in windows)):
            if all(is_causal(self.at(name, n), n, window, hidden) for n in lengths):
                return CausalMask(window, additive or hidden)
        return None

    def _numbers(self, name: str) -> set[int]:
        """Whole constants in the value's history: a window is one of them."""
        found: set[int] = set()
        seen: set[str] = set()
        pending = [name]
        while pending:
            at = pending.pop()
            if at in seen or not at:
                continue
            seen.add(at)
            node = self.maker.get(at)
            if node is None or node.op_type == "Constant":
                value = self.at(at, LENGTHS[0])
                found |= {abs(int(value.reshape(-1)[0]))} if value.size == 1 and value.dtype.kind in "iu" else set()
            elif node.op_type != "Shape":
                pending.extend(node.input)
        return found


def is_causal(value: Array, n: int, window: int, hidden: bool) -> bool:
    matrix = value.reshape(n, n)
    if matrix.dtype == np.bool_:
        seen = ~matrix if hidden else matrix
    else:
        seen = matrix == 0
        if not bool((matrix[~seen] <= HIDDEN).all()):
            return False
    wanted = np.tril(np.ones((n, n), np.bool_))
    if window:
        wanted &= ~np.tril(np.ones((n, n), np.bool_), -window)
    return bool((seen == wanted).all())


def run(node: onnx.NodeProto, inputs: dict[str, Array], opset: int) -> list[Array]:
    """One node by the reference implementation."""
    given = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for name, x in inputs.items()]
    made = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    model = helper.make_model(helper.make_graph([node], "one", given, made), opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    with np.errstate(all="ignore"):
        found = iter(ReferenceEvaluator(model).run(None, inputs))
    return [np.asarray(next(found)) if name else np.zeros(0) for name in node.output]
