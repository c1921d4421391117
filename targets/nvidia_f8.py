"""Lowerings of linears whose rows are e4m3 as their weights are: a launch quantises the rows, the next one multiplies.

Rows that many linears read are quantised once where those linears are stacked (fuse-qkv, fuse-gate-up), else once for each.
"""

from __future__ import annotations

from dataclasses import replace

from mlsdc.compiler import ops_quant
from mlsdc.compiler.graph import Graph, Node
from mlsdc.targets.nvidia import NvidiaTarget, lowers
from mlsdc.targets.nvidia_rows import HEADER, by_rows, rows, too_large
from mlsdc.targets.protocol import Call, Declined, KernelSpec, Lowering, TempRef
from mlsdc.targets.values import counted_rows, input_type, values, whole
from mlsdc.templates import params_triton_f8 as P

FIRST = 89  # the first architecture whose tensor cores multiply e4m3
CODES, SCALES = TempRef("codes"), TempRef("scales")


@lowers(ops_quant.LinearF8)
def lower_linear_f8(target: NvidiaTarget, node: Node, op: ops_quant.LinearF8, graph: Graph) -> Lowering | Declined:
    n, k = whole(input_type(graph, node, 1))
    params = P.LinearF8(*rows(node), n, k, "u8", op.bias, op.residual, block_k=P.step(k))
    return multiplied(target, node, params, n, node.inputs[-1] if op.residual else None)


@lowers(ops_quant.GatedF8)
def lower_gated_f8(target: NvidiaTarget, node: Node, op: ops_quant.GatedF8, graph: Graph) -> Lowering | Declined:
    n2, k = whole(input_type(graph, node, 1))
    return multiplied(target, node, P.GatedF8(*rows(node), n2 // 2, k, "u8", act=op.act, block_k=P.step(k)), n2)


def multiplied(target: NvidiaTarget, node: Node, params: P.LinearF8 | P.GatedF8, n: int, in_place_of: str | None = None
               ) -> Lowering | Declined:
    """`n`: rows of the weight."""
    if target.gpu.sm < FIRST:
        return Declined(f"{node.op.opname} needs tensor cores that multiply e4m3 (sm_{FIRST} and later), {target.name} is "
                        f"{', '.join(target.requires)}; 'weights: fp8' keeps rows as they are and runs there")
    if why := too_large(n, params.k, node):
        return Declined(why)
    x, w, *more = values(node)
    quantise = P.QuantiseF8(params.count, params.max_rows, params.k)
    first = Call(KernelSpec(quantise.template, quantise, ("x_ptr: *f32", "header: *i32", "y_ptr: *u8", "scale_ptr: *f32")), 1,
                 counted_rows(node.type)[1], (x, HEADER, CODES, SCALES))
    extra = (("bias_ptr: *f32",) if params.bias else ()) + (("residual_ptr: *f32",) if params.residual else ())
    abi = ("x_ptr: *u8", "x_scales: *f32", "w_ptr: *u8", *extra, "header: *i32", "y_ptr: *f32")
    rest = by_rows(node, target, params, abi, (CODES, SCALES, w, *more, HEADER), in_place_of)
    temps = {"codes": params.max_rows * params.k, "scales": 4 * params.max_rows}
    return replace(rest, calls=(first, *rest.calls), temps=temps)
