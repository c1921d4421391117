"""Elementwise ops and copies on NVIDIA GPUs, so that fusion passes may be left out. Attention op by op has no templates: it is fused."""

from __future__ import annotations

from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.ops import Op
from mlsdc.runtime.program import InputArg
from mlsdc.targets.elementwise import OPS, classified
from mlsdc.targets.nvidia import NvidiaTarget, lowers
from mlsdc.targets.nvidia_rows import launch, rows
from mlsdc.targets.protocol import Declined, Lowering
from mlsdc.targets.values import values
from mlsdc.templates import params_triton_rows as P


def lower_elementwise(target: NvidiaTarget, node: Node, op: Op, graph: Graph) -> Lowering | Declined:
    found = classified(node, graph)
    if isinstance(found, Declined):
        return found
    operands = tuple(P.Operand(operand.strides, operand.start) for operand in found.operands)
    params = P.Elementwise(*rows(node), found.fn, found.dims, operands, found.value)
    abi = (*("a_ptr: *f32", "b_ptr: *f32")[: len(operands)], "header: *i32", "y_ptr: *f32")
    return launch(node, params, abi, (*values(node), InputArg("header")), grid=params.grid)


for elementwise in OPS:
    lowers(elementwise)(lower_elementwise)
