"""tap-hidden: residual streams of the target that heads read become outputs of its row program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Graph
from mlsdc.compiler.module import Module
from mlsdc.compiler.ops_core import GatherRows
from mlsdc.compiler.ops_nn import Attention, RmsNorm
from mlsdc.compiler.pipeline import Pass
from mlsdc.compiler.rewrite import note
from mlsdc.compiler.types import TensorType


@dataclass(frozen=True)
class TapHidden(Pass):
    """Tap k is the residual stream after k layers: what layer k's first norm reads, or the last norm, of all rows.

    Before::

        output logits = %lm_head, choices = %choices

    After, with taps (30,)::

        output logits = %lm_head, choices = %choices, hidden.30 = %layers.29.mlp.residual

    Declines where no level asks for taps. Raises CompileError for a tap that the graph has no such value for.
    """

    name: ClassVar[str] = "tap-hidden"

    def run(self, module: Module) -> Module:
        taps = sorted({tap for level in module.levels[:-1] for tap in level.params.get("taps", ())})
        target = module.target
        if not taps or "forward" not in target.graphs:
            return module
        graph = target.graphs["forward"]
        outputs = tuple((f"hidden.{tap}", stream(graph, tap)) for tap in taps)
        note("hidden state => output", graph.name, outputs[0][1])
        tapped = replace(graph, outputs=(*graph.outputs, *outputs))
        return replace(module, levels=(*module.levels[:-1], target.with_graph("forward", tapped)))


def stream(graph: Graph, tap: int) -> str:
    """The value that is the residual stream after `tap` layers."""
    attentions = [node for node in graph if isinstance(node.op, Attention)]
    found = None
    if tap < len(attentions):
        name = attentions[tap].inputs[0]
        while not isinstance(graph[name].op, RmsNorm) or graph[name].type.rank != 2:  # type: ignore[union-attr]
            if not graph[name].inputs:
                break
            name = graph[name].inputs[0]
        else:
            found = graph[name].inputs[0]
    elif tap == len(attentions):
        gathers = [node for node in graph if isinstance(node.op, GatherRows)]
        found = gathers[0].inputs[0] if len(gathers) == 1 else None
        if found is not None and isinstance(graph[found].op, RmsNorm):
            found = graph[found].inputs[0]
    type_ = graph[found].type if found is not None else None
    if found is None or not isinstance(type_, TensorType) or type_.rank != 2:
        raise CompileError(f"graph '{graph.name}': no residual stream after {tap} of {len(attentions)} layers was found for a head to read")
    return found
