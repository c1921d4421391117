"""Linears of e4m3 rows on the CPU, which has no arithmetic on e4m3: rows are rounded to such numbers, then multiplied as f32.

For comparisons with GPUs; `weights: fp8` does less work and is more precise here.
"""

from __future__ import annotations

from mlsdc.compiler import ops_quant
from mlsdc.compiler.graph import Graph, Node
from mlsdc.targets.cpu import HEADER, CpuTarget, lowers, rows_of, spec, storage
from mlsdc.targets.protocol import Call, CallArg, Lowering, TempRef, ValueRef
from mlsdc.targets.values import input_type, values, whole
from mlsdc.templates import params_plain as P

ROUNDED, PRODUCT, ACTIVE = TempRef("rounded"), TempRef("product"), TempRef("active")


def multiplied(node: Node, graph: Graph, result: CallArg, bias: bool = False) -> tuple[Call, Call]:
    """The rounding of a node's first input, and the product with its weight; the bias is its third input."""
    index, count, rows = rows_of(node.type)
    n, k = whole(input_type(graph, node, 1))
    x, w, *more = values(node)
    first = Call(spec("round_f8", P.RoundF8(rows, k), "X: f32", "Y: f32"), 1, count, (x, ROUNDED))
    abi = ("X: f32", "W: f8", "S: f32", *(("B: f32",) if bias else ()), "Y: f32", "H: i32")
    args = (ROUNDED, w, w, *more[: int(bias)], result, HEADER)
    return first, Call(spec("linear_f8", P.LinearF8(index, rows, n, k, bias), *abi), -(-n // 16), None, args)


@lowers(ops_quant.LinearF8)
def lower_linear_f8(target: CpuTarget, node: Node, op: ops_quant.LinearF8, graph: Graph) -> Lowering:
    _, count, rows = rows_of(node.type)
    n, k = whole(input_type(graph, node, 1))
    temps = {"rounded": 4 * rows * k}
    if not op.residual:
        return Lowering(multiplied(node, graph, ValueRef(node.name), op.bias), storage(node.type), temps)
    dense = P.Operand(rows * n, (n, 1))
    add = spec("elementwise", P.Elementwise("add", rows, (n,), (dense, dense)), "A: f32", "B: f32", "Y: f32")
    last = Call(add, 1, count, (PRODUCT, values(node)[-1], ValueRef(node.name)))
    return Lowering((*multiplied(node, graph, PRODUCT, op.bias), last), storage(node.type), temps | {"product": 4 * rows * n})


@lowers(ops_quant.GatedF8)
def lower_gated_f8(target: CpuTarget, node: Node, op: ops_quant.GatedF8, graph: Graph) -> Lowering:
    """Both halves by one linear, then the activation, then the product."""
    _, count, rows = rows_of(node.type)
    n2, k = whole(input_type(graph, node, 1))
    n = n2 // 2
    gate, up, active = P.Operand(rows * n2, (n2, 1)), P.Operand(rows * n2, (n2, 1), n), P.Operand(rows * n, (n, 1))
    act = spec("elementwise", P.Elementwise(op.act, rows, (n,), (gate,)), "A: f32", "Y: f32")
    mul = spec("elementwise", P.Elementwise("mul", rows, (n,), (active, up)), "A: f32", "B: f32", "Y: f32")
    calls = (*multiplied(node, graph, PRODUCT), Call(act, 1, count, (PRODUCT, ACTIVE)),
             Call(mul, 1, count, (ACTIVE, PRODUCT, ValueRef(node.name))))
    return Lowering(calls, storage(node.type), {"rounded": 4 * rows * k, "product": 4 * rows * n2, "active": 4 * rows * n})
