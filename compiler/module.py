"""A module: the cascade with every level's graphs in one value that passes take and give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlsdc.compiler.graph import Graph
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.manifest import Plan


@dataclass(frozen=True)
class LevelModule:
    """One level. `graphs` maps program name (`forward`) -> graph; levels without weights (ngram) have none. `params` are the YAML's."""

    name: str
    kind: str
    params: Mapping[str, Any] = field(default_factory=dict)
    graphs: Mapping[str, Graph] = field(default_factory=dict)
    kv: KvGeometry | None = None

    def with_graph(self, program: str, graph: Graph) -> LevelModule:
        return replace(self, graphs={**self.graphs, program: graph})


@dataclass(frozen=True)
class Module:
    """Levels cheapest first; the last one is the target. `plan` is what plan-cascade decides."""

    name: str
    levels: tuple[LevelModule, ...]
    plan: Plan | None = None

    @property
    def target(self) -> LevelModule:
        return self.levels[-1]

    def map_graphs(self, change: Callable[[Graph], Graph]) -> Module:
        """The module with `change` applied to every graph of every level."""
        levels = (replace(level, graphs={name: change(graph) for name, graph in level.graphs.items()}) for level in self.levels)
        return replace(self, levels=tuple(levels))

    def verify(self) -> None:
        for level in self.levels:
            for graph in level.graphs.values():
                graph.verify()
