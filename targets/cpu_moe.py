"""Lowerings of mixtures of experts on the CPU: pairs (row, slot) sorted by expert, then a task for each expert hit and block of columns."""

from __future__ import annotations

from math import prod

from mlsdc.compiler import ops_core, ops_moe
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.types import DType, TensorType
from mlsdc.targets.cpu import A8_IN, HEADER, TINY, CpuTarget, a8_args, fine_abi, lowers, rows_of, spec, storage
from mlsdc.targets.cpu_plain import launch
from mlsdc.targets.protocol import Call, CallArg, Declined, Lowering, TempRef, ValueRef
from mlsdc.targets.values import fine_args, fine_of, input_type, is_rows, values, whole
from mlsdc.templates import params_moe as P


@lowers(ops_moe.TopIndex)
def lower_top_index(target: CpuTarget, node: Node, op: ops_moe.TopIndex, graph: Graph) -> Lowering | Declined:
    x = input_type(graph, node, 0)
    if not is_rows(x) or x.rank != 2:
        return Declined(f"top_index of {x}")
    (n,) = whole(x)
    return launch(node, spec("top_index", P.TopIndex(rows_of(x)[2], n, op.k), "X: f32", "Y: i32"), 1, *values(node))


@lowers(ops_moe.Take)
def lower_take(target: CpuTarget, node: Node, op: ops_moe.Take, graph: Graph) -> Lowering | Declined:
    x, index = input_type(graph, node, 0), input_type(graph, node, 1)
    if not is_rows(x) or index.dtype is not DType.I32:
        return Declined(f"take of {x} by {index}")
    (n,), (k,) = whole(x), whole(index)
    return launch(node, spec("take", P.Take(rows_of(x)[2], n, k), "X: f32", "INDEX: i32", "Y: f32"), 1, *values(node))


@lowers(ops_core.Reduce)
def lower_reduce(target: CpuTarget, node: Node, op: ops_core.Reduce, graph: Graph) -> Lowering | Declined:
    x = input_type(graph, node, 0)
    axis = op.axis % x.rank
    if not is_rows(x) or axis == 0:
        return Declined(f"reduce {op.fn} of {x} over axis {op.axis}")
    sizes = whole(x)
    params = P.Reduce(op.fn, rows_of(x)[2], prod(sizes[: axis - 1]), sizes[axis - 1], prod(sizes[axis:]))
    return launch(node, spec("reduce", params, "X: f32", "Y: f32"), 1, *values(node))


@lowers(ops_moe.ExpertLinear)
def lower_expert_linear(target: CpuTarget, node: Node, op: ops_moe.ExpertLinear, graph: Graph) -> Lowering | Declined:
    x, weight = input_type(graph, node, 0), input_type(graph, node, 1)
    if not is_rows(x) or weight.dtype is not DType.F32:
        return Declined(f"expert_linear of {x} and {weight}; the CPU has it for f32 rows and weights")
    (slots,), (inputs, k), (_, n) = whole(input_type(graph, node, 2)), whole(x), whole(node_type(node))
    index, count, rows = rows_of(node.type)
    params = P.ExpertLinearF32(index, rows, op.experts, slots, n, k, inputs, len(node.inputs) == 4)
    kernel = spec("expert_linear_f32", params, "X: f32", "W: f32", "PLAN: i32", *(("B: f32",) if params.bias else ()), "Y: f32")
    bias = (ValueRef(node.inputs[3]),) if params.bias else ()
    args = (ValueRef(node.inputs[0]), ValueRef(node.inputs[1]), TempRef("plan"), *bias, ValueRef(node.name))
    call = Call(kernel, slots * params.blocks, count, args)
    return Lowering((planned(node, params), call), storage(node.type), {"plan": params.plan_size * 4})


@lowers(ops_moe.ExpertLinearQ)
def lower_expert_linear_q(target: CpuTarget, node: Node, op: ops_moe.ExpertLinearQ, graph: Graph) -> Lowering | Declined:
    weight = input_type(graph, node, 1)
    if weight.dtype not in (DType.Q8, DType.Q4):
        return Declined(f"weight of {weight.dtype}; the CPU multiplies q8 and q4")
    (slots,), (_, k), (_, n) = whole(input_type(graph, node, 2)), whole(weight), whole(node_type(node))
    if n % 16:
        return Declined(f"{n} output columns an expert; the CPU's blocks have 16")
    index, count, rows = rows_of(node.type)
    fine = fine_of(graph, node.inputs[0])
    params = P.ExpertLinearQ(
        index, rows, op.experts, slots, str(weight.dtype), n, k, op.inputs, target.isa.dot, op.bias, len(fine))
    bias = (ValueRef(node.inputs[3]),) if op.bias else ()
    abi = (f"W: {weight.dtype}", *A8_IN, "PLAN: i32", *(("B: f32",) if op.bias else ()), "Y: f32", "H: i32", *fine_abi(fine))
    args: tuple[CallArg, ...] = (
        ValueRef(node.inputs[1]), *a8_args(node.inputs[0], rows, k * op.inputs, len(fine)), TempRef("plan"), *bias, ValueRef(node.name),
        HEADER, *fine_args(fine))
    call = Call(spec("expert_linear_q", params, *abi), slots * params.blocks, count, args)
    return Lowering((planned(node, params), call), storage(node.type), {"plan": params.plan_size * 4})


def planned(node: Node, params: P.Experts) -> Call:
    """The launch that sorts the pairs."""
    plan = P.ExpertPlan(params.count, params.rows_padded, params.experts, params.slots)
    kernel = spec("expert_plan", plan, "INDEX: i32", "PLAN: i32", "H: i32")
    return Call(kernel, 1, None, (ValueRef(node.inputs[2]), TempRef("plan"), HEADER), TINY)


def node_type(node: Node) -> TensorType:
    assert isinstance(node.type, TensorType)
    return node.type
