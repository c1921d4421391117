"""Lowerings of the ops that drafting levels add, on the CPU."""

from __future__ import annotations

from mlsdc.compiler import ops_heads
from mlsdc.compiler.graph import Graph, Node
from mlsdc.targets.cpu import CpuTarget, lowers, rows_of, spec
from mlsdc.targets.cpu_plain import launch
from mlsdc.targets.protocol import Lowering
from mlsdc.targets.values import input_type, values, whole
from mlsdc.templates.params_heads import TopK


@lowers(ops_heads.TopK)
def lower_top_k(target: CpuTarget, node: Node, op: ops_heads.TopK, graph: Graph) -> Lowering:
    (n,) = whole(input_type(graph, node, 0))
    params = TopK(rows_of(node.type)[2], n, op.k)
    return launch(node, spec("top_k", params, "X: f32", "Y: f32"), 1, *values(node))
