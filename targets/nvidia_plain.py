"""Elementwise ops and copies on NVIDIA GPUs, so that fusion passes may be left out. Attention op by op has no templates: it is fused."""

from __future__ import annotations

from mlsdc.compiler import ops_core
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.types import DType, TensorType
from mlsdc.runtime.program import InputArg
from mlsdc.targets.nvidia import NvidiaTarget, input_type, is_rows, lowers, whole
from mlsdc.targets.nvidia_rows import launch, rows, values
from mlsdc.targets.protocol import Declined, Lowering
from mlsdc.targets.strides import POWERS, Strides, broadcast, collapsed, strides_of
from mlsdc.templates import params_triton_rows as P


@lowers(ops_core.Unary)
def lower_unary(target: NvidiaTarget, node: Node, op: ops_core.Unary, graph: Graph) -> Lowering | Declined:
    if op.fn in ("cos", "sin"):
        return Declined(f"unary {op.fn}; angles are turned in rope_table only (is raise-rope disabled?)")
    return elementwise(node, graph, op.fn)


@lowers(ops_core.Binary)
def lower_binary(target: NvidiaTarget, node: Node, op: ops_core.Binary, graph: Graph) -> Lowering | Declined:
    return Declined("binary pow") if op.fn == "pow" else elementwise(node, graph, op.fn)


@lowers(ops_core.Scalar)
def lower_scalar(target: NvidiaTarget, node: Node, op: ops_core.Scalar, graph: Graph) -> Lowering | Declined:
    if op.fn != "pow":
        return elementwise(node, graph, op.fn, op.value)
    if op.value not in POWERS:
        return Declined(f"pow by {op.value}; there are {', '.join(map(str, POWERS))}")
    return elementwise(node, graph, POWERS[op.value])


@lowers(ops_core.Expand)
def lower_expand(target: NvidiaTarget, node: Node, op: ops_core.Expand, graph: Graph) -> Lowering | Declined:
    return elementwise(node, graph, "copy")


@lowers(ops_core.Slice)
def lower_slice(target: NvidiaTarget, node: Node, op: ops_core.Slice, graph: Graph) -> Lowering | Declined:
    x = input_type(graph, node, 0)
    if not is_rows(x):
        return Declined(f"slice of {x}")
    strides = strides_of(x)
    return elementwise(node, graph, "copy", moved=(strides, op.start * strides[op.axis % x.rank]))


@lowers(ops_core.Transpose)
def lower_transpose(target: NvidiaTarget, node: Node, op: ops_core.Transpose, graph: Graph) -> Lowering | Declined:
    x = input_type(graph, node, 0)
    swap = {op.a % x.rank: op.b % x.rank, op.b % x.rank: op.a % x.rank}
    if not is_rows(x) or 0 in swap:
        return Declined(f"transpose of {x} by axes {op.a} and {op.b}")
    strides = strides_of(x)
    return elementwise(node, graph, "copy", moved=(tuple(strides[swap.get(axis, axis)] for axis in range(x.rank)), 0))


def elementwise(
    node: Node, graph: Graph, fn: str, value: float | None = None, moved: tuple[Strides, int] | None = None
) -> Lowering | Declined:
    """fn over rows. `moved`: strides and start of the one input, where they are not what its shape says."""
    out = node.type
    if not is_rows(out) or not isinstance(out, TensorType):
        return Declined(f"{node.op.opname} {fn} of {out}")
    found = []
    for index in range(len(node.inputs)):
        x = input_type(graph, node, index)
        if x.dtype is not DType.F32 or not all(isinstance(size, int) for size in x.shape[1:]):
            return Declined(f"{node.op.opname} {fn} of {x}")
        found.append(moved or (broadcast(x, out), 0))
    dims, steps = collapsed(whole(out), [strides for strides, _ in found])
    operands = tuple(P.Operand(strides, start) for strides, (_, start) in zip(steps, found, strict=True))
    params = P.Elementwise(*rows(node), fn, dims, operands, value)
    abi = (*("a_ptr: *f32", "b_ptr: *f32")[: len(operands)], "header: *i32", "y_ptr: *f32")
    return launch(node, params, abi, (*values(node), InputArg("header")), grid=params.grid)
