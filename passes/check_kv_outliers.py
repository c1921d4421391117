"""check-kv-outliers: run the model on a few tokens and give keys that a cache format would spoil more bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from mlsdc.compiler.calibrate import Calibration
from mlsdc.compiler.graph import Graph
from mlsdc.compiler.module import Module
from mlsdc.compiler.ops_nn import Attention
from mlsdc.compiler.pipeline import Pass
from mlsdc.compiler.rewrite import note
from mlsdc.passes.calibrate_activations import Only
from mlsdc.passes.insert_paged_kv import attentions

if TYPE_CHECKING:
    from mlsdc.compiler.kv_outliers import Layer

TOKENS = 64
FILLED = {"tokens", "positions", "out_rows"}  # inputs of a row program that a text fills


@dataclass(frozen=True)
class CheckKvOutliers(Pass):
    """Layers whose keys the cache format would spoil keep more bits: `kv_format` of the target's parameters says which.

    Before::

        kv int4-token, %layers.3.attn.attend = attention(%q, %k, %v)         keys with two channels fifty times as large as the others

    After::

        kv int4-token@3=int8/int4-token, the graph as it was; `kv_outliers` of the target's parameters says why

    compiler/kv_outliers.py says what an outlier is; `norms` are numbers a layer by name that it looks at beside what it measures.
    Declines: a 16-bit cache; no calibration given; a graph with other inputs than the target's.
    """

    name: ClassVar[str] = "check-kv-outliers"
    format: str = "bf16"
    page_size: int = 32
    calibration: Calibration | None = None
    norms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def run(self, module: Module) -> Module:
        from mlsdc.compiler.kv_outliers import outliers, with_outliers

        target = module.target
        graph = target.graphs.get("forward")
        if graph is None or self.calibration is None or self.format.startswith("bf16") or not attentions(graph):
            return module
        if not {node.name for node in graph.inputs()} <= FILLED:
            return module
        found = outliers(layers(graph, self.calibration), self.format, self.page_size, self.norms)
        if not found:
            return module
        for outlier in found:
            note("keys of few bits -> keys of more bits", graph.name, attentions(graph)[outlier.layer].name)
        params = {**target.params, "kv_format": with_outliers(self.format, found), "kv_outliers": [str(outlier) for outlier in found]}
        return replace(module, levels=(*module.levels[:-1], replace(target, params=params)))


def layers(graph: Graph, calibration: Calibration) -> list[Layer]:
    """Queries and keys of every attention, over the first tokens of the calibration."""
    import numpy as np

    from mlsdc.compiler.interpret import interpret
    from mlsdc.compiler.kv_outliers import Layer

    nodes = attentions(graph)
    tokens = np.array(calibration.tokens[:TOKENS], np.int32)
    rows = np.arange(len(tokens), dtype=np.int32)
    taps = Only([name for node in nodes for name in node.inputs[:2]])
    interpret(graph, {"tokens": tokens, "positions": rows, "out_rows": rows}, calibration.weights, taps=taps)
    found = []
    for node in nodes:
        assert isinstance(node.op, Attention)
        q, k = (np.asarray(taps[name], np.float32) for name in node.inputs[:2])
        found.append(Layer(q, k, node.op.scale))
    return found
