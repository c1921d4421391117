"""Elementwise ops and copies as one kernel each: a function over rows, and how it steps through its operands. Code is the target's."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.compiler import ops_core
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.types import DType, TensorType
from mlsdc.targets.protocol import Declined
from mlsdc.targets.strides import POWERS, Strides, broadcast, collapsed, strides_of
from mlsdc.targets.values import input_type, is_rows, whole

OPS = (ops_core.Unary, ops_core.Binary, ops_core.Scalar, ops_core.Expand, ops_core.Slice, ops_core.Transpose)


@dataclass(frozen=True)
class Stepped:
    """An f32 operand: element (row, i0, i1, ..) of the kernel lies at `start` + index . `strides`."""

    type: TensorType
    strides: Strides
    start: int


@dataclass(frozen=True)
class Elementwise:
    """y[rows, *dims] = fn(a), fn(a, value) or fn(a, b); expansions, slices and transposes are a `copy` by strides."""

    fn: str
    value: float | None
    dims: tuple[int, ...]
    operands: tuple[Stepped, ...]


def classified(node: Node, graph: Graph) -> Elementwise | Declined:
    """The kernel of a node whose op is one of OPS."""
    op = node.op
    if isinstance(op, ops_core.Unary):
        if op.fn in ("cos", "sin"):
            return Declined(f"unary {op.fn}; angles are turned in rope_table only (is raise-rope disabled?)")
        return over_rows(node, graph, op.fn)
    if isinstance(op, ops_core.Binary):
        return Declined("binary pow") if op.fn == "pow" else over_rows(node, graph, op.fn)
    if isinstance(op, ops_core.Scalar):
        if op.fn != "pow":
            return over_rows(node, graph, op.fn, op.value)
        if op.value not in POWERS:
            return Declined(f"pow by {op.value}; there are {', '.join(map(str, POWERS))}")
        return over_rows(node, graph, POWERS[op.value])
    if isinstance(op, ops_core.Slice):
        return sliced(node, graph, op)
    if isinstance(op, ops_core.Transpose):
        return transposed(node, graph, op)
    assert isinstance(op, ops_core.Expand)
    return over_rows(node, graph, "copy")


def sliced(node: Node, graph: Graph, op: ops_core.Slice) -> Elementwise | Declined:
    x = input_type(graph, node, 0)
    if not is_rows(x):
        return Declined(f"slice of {x}")
    strides = strides_of(x)
    return over_rows(node, graph, "copy", moved=(strides, op.start * strides[op.axis % x.rank]))


def transposed(node: Node, graph: Graph, op: ops_core.Transpose) -> Elementwise | Declined:
    x = input_type(graph, node, 0)
    swap = {op.a % x.rank: op.b % x.rank, op.b % x.rank: op.a % x.rank}
    if not is_rows(x) or 0 in swap:
        return Declined(f"transpose of {x} by axes {op.a} and {op.b}")
    strides = strides_of(x)
    return over_rows(node, graph, "copy", moved=(tuple(strides[swap.get(axis, axis)] for axis in range(x.rank)), 0))


def over_rows(
    node: Node, graph: Graph, fn: str, value: float | None = None, moved: tuple[Strides, int] | None = None
) -> Elementwise | Declined:
    """`moved`: strides and start of the one input, where they are not what its shape says."""
    out = node.type
    if not isinstance(out, TensorType) or not is_rows(out):
        return Declined(f"{node.op.opname} {fn} of {out}")
    types = [input_type(graph, node, index) for index in range(len(node.inputs))]
    for x in types:
        if x.dtype is not DType.F32 or not all(isinstance(size, int) for size in x.shape[1:]):
            return Declined(f"{node.op.opname} {fn} of {x}")
    read = [moved or (broadcast(x, out), 0) for x in types]
    dims, steps = collapsed(whole(out), [strides for strides, _ in read])
    operands = (Stepped(x, strides, start) for x, strides, (_, start) in zip(types, steps, read, strict=True))
    return Elementwise(fn, value, dims, tuple(operands))
