"""Linears of e4m3 rows on the CPU, which has no arithmetic on e4m3: rows are rounded to such numbers, then multiplied as f32.

For comparisons with GPUs; `weights: fp8` does less work and is more precise here.
"""

from __future__ import annotations

from mlsdc.compiler import ops_quant
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.types import TensorType
from mlsdc.targets.cpu import CpuTarget, lowers, rows_of, spec, storage
from mlsdc.targets.cpu_plain import BOTH, gated, linear_call
from mlsdc.targets.protocol import Call, CallArg, Lowering, TempRef, ValueRef
from mlsdc.targets.values import input_type, values, whole
from mlsdc.templates import params_plain as P

ROUNDED, PRODUCT = TempRef("rounded"), TempRef("product")


def multiplied(node: Node, graph: Graph, result: CallArg, bias: bool = False) -> tuple[tuple[Call, Call], dict[str, int]]:
    """The rounding of a node's first input, and the product with its weight; the bias is its third input. And what that takes."""
    _, count, rows = rows_of(node.type)
    weight = input_type(graph, node, 1)
    k = whole(weight)[1]
    x, w, *more = values(node)
    first = Call(spec("round_f8", P.RoundF8(rows, k), "X: f32", "Y: f32"), 1, count, (x, ROUNDED))
    return (first, linear_call(node, weight, (ROUNDED, w, *more[: int(bias)]), result)), {ROUNDED.temp: 4 * rows * k}


@lowers(ops_quant.LinearF8)
def lower_linear_f8(target: CpuTarget, node: Node, op: ops_quant.LinearF8, graph: Graph) -> Lowering:
    assert isinstance(node.type, TensorType)
    _, count, rows = rows_of(node.type)
    (n,) = whole(node.type)
    calls, temps = multiplied(node, graph, PRODUCT if op.residual else ValueRef(node.name), op.bias)
    if not op.residual:
        return Lowering(calls, storage(node.type), temps)
    dense = P.Operand(rows * n, (n, 1))
    add = spec("elementwise", P.Elementwise("add", rows, (n,), (dense, dense)), "A: f32", "B: f32", "Y: f32")
    last = Call(add, 1, count, (PRODUCT, values(node)[-1], ValueRef(node.name)))
    return Lowering((*calls, last), storage(node.type), temps | {PRODUCT.temp: 4 * rows * n})


@lowers(ops_quant.GatedF8)
def lower_gated_f8(target: CpuTarget, node: Node, op: ops_quant.GatedF8, graph: Graph) -> Lowering:
    calls, temps = multiplied(node, graph, BOTH)
    return gated(node, op.act, calls, temps)
