"""Lowerings that drafting levels and the routers of mixtures of experts add on NVIDIA GPUs."""

from __future__ import annotations

from math import prod

from mlsdc.compiler import ops_core, ops_heads, ops_moe, ops_nn
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.types import DType
from mlsdc.targets.nvidia import NvidiaTarget, columns_of, lowers, sizes, storage
from mlsdc.targets.nvidia_rows import HEADER, MOST_ROW, launch, rows
from mlsdc.targets.protocol import Call, Declined, KernelSpec, Lowering, TempRef, ValueRef
from mlsdc.targets.values import counted_rows, input_type, is_rows, values, whole
from mlsdc.templates import params_triton_levels as P


@lowers(ops_heads.TopK)
def lower_top_k(target: NvidiaTarget, node: Node, op: ops_heads.TopK, graph: Graph) -> Lowering | Declined:
    word, count, most = counted_rows(node.type)
    n = columns_of(input_type(graph, node, 0))
    part, join = (kind(word, most, n, op.k) for kind in (P.TopK, P.TopKJoin))
    value, index, total = TempRef("values"), TempRef("indices"), TempRef("sums")
    found = ("value_ptr: *f32", "index_ptr: *i32", "sum_ptr: *f32")
    first = Call(KernelSpec(part.template, part, ("x_ptr: *f32", "header: *i32", *found)), part.parts, count,
                 (ValueRef(node.inputs[0]), HEADER, value, index, total))
    second = Call(KernelSpec(join.template, join, (*found, "header: *i32", "y_ptr: *f32")), 1, count,
                  (value, index, total, HEADER, ValueRef(node.name)))
    size = 4 * most * part.parts
    return Lowering((first, second), storage(node.type), {"values": size * op.k, "indices": size * op.k, "sums": size})


@lowers(ops_moe.TopIndex)
def lower_top_index(target: NvidiaTarget, node: Node, op: ops_moe.TopIndex, graph: Graph) -> Lowering | Declined:
    x = input_type(graph, node, 0)
    if not is_rows(x) or x.rank != 2 or columns_of(x) > MOST_ROW:
        return Declined(f"top_index of {x}; a program holds {MOST_ROW} columns of f32")
    params = P.TopIndex(*rows(node), columns_of(x), op.k)
    return launch(node, params, ("x_ptr: *f32", "header: *i32", "y_ptr: *i32"), (*values(node), HEADER))


@lowers(ops_moe.Take)
def lower_take(target: NvidiaTarget, node: Node, op: ops_moe.Take, graph: Graph) -> Lowering | Declined:
    x, index = input_type(graph, node, 0), input_type(graph, node, 1)
    if not is_rows(x) or index.dtype is not DType.I32 or columns_of(index) > MOST_ROW:
        return Declined(f"take of {x} by {index}")
    params = P.Take(*rows(node), columns_of(x), columns_of(index))
    return launch(node, params, ("x_ptr: *f32", "index_ptr: *i32", "header: *i32", "y_ptr: *f32"), (*values(node), HEADER))


@lowers(ops_core.Reduce)
def lower_reduce(target: NvidiaTarget, node: Node, op: ops_core.Reduce, graph: Graph) -> Lowering | Declined:
    x = input_type(graph, node, 0)
    axis = op.axis % x.rank
    if not is_rows(x) or axis == 0:
        return Declined(f"reduce {op.fn} of {x} over axis {op.axis}")
    own = whole(x)
    params = P.Reduce(*rows(node), op.fn, prod(own[: axis - 1]), own[axis - 1], prod(own[axis:]))
    if max(params.inner, params.n if params.inner == 1 else 1) > MOST_ROW:
        return Declined(f"reduce {op.fn} of {x} over axis {op.axis}; a program holds {MOST_ROW} numbers")
    return launch(node, params, ("x_ptr: *f32", "header: *i32", "y_ptr: *f32"), (*values(node), HEADER), grid=params.outer)


@lowers(ops_core.Softmax)
def lower_softmax(target: NvidiaTarget, node: Node, op: ops_core.Softmax, graph: Graph) -> Lowering | Declined:
    x = input_type(graph, node, 0)
    if not is_rows(x) or sizes(x)[-1] > MOST_ROW:
        return Declined(f"softmax of {x}; a program holds {MOST_ROW} static columns: attention is fused")
    params = P.Softmax(*rows(node), prod(sizes(x)[1:-1]), sizes(x)[-1])
    return launch(node, params, ("x_ptr: *f32", "header: *i32", "y_ptr: *f32"), (*values(node), HEADER), grid=params.heads)


@lowers(ops_nn.PadHeads)
def lower_pad_heads(target: NvidiaTarget, node: Node, op: ops_nn.PadHeads, graph: Graph) -> Lowering | Declined:
    x = input_type(graph, node, 0)
    if not is_rows(x) or prod(sizes(node.type)[1:]) > MOST_ROW:
        return Declined(f"pad_heads of {x}")
    params = P.PadHeads(*rows(node), prod(sizes(x)[1:]), prod(sizes(node.type)[1:]))
    return launch(node, params, ("x_ptr: *f32", "header: *i32", "y_ptr: *f32"), (*values(node), HEADER))
