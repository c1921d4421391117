"""Every node as launches of the target's kernels; what no kernel covers is one error that lists the nodes and the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Graph, Input, Node, Weight
from mlsdc.targets.protocol import Declined, Lowering, Target

SHOWN = 5


@dataclass(frozen=True)
class Selected:
    """`prologue` runs first; `nodes` are in the graph's order, inputs and weights left out."""

    prologue: Sequence[Lowering]
    nodes: Sequence[tuple[Node, Lowering]]


def select_kernels(graph: Graph, target: Target) -> Selected:
    """Raises CompileError naming the nodes that `target` declines, and why."""
    chosen: list[tuple[Node, Lowering]] = []
    declined: list[str] = []
    for node in graph:
        if isinstance(node.op, Input | Weight):
            continue
        lowering = target.lower(node, graph)
        if isinstance(lowering, Declined):
            declined.append(f"%{node.name}: {lowering.why}")
        else:
            chosen.append((node, lowering))
    if declined:
        more = f"; and {len(declined) - SHOWN} more" if len(declined) > SHOWN else ""
        raise CompileError(f"target {target.name} declines {'; '.join(declined[:SHOWN])}{more}")
    return Selected(target.prologue(graph), chosen)
