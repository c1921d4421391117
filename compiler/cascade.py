"""The cascade as a graph: who verifies whose drafts, checked.

A level's `params["verified_by"]` names the level that verifies it; without it that is the next level. Several levels with the same
verifier are *merged*: their nodes go into one tree.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from mlsdc.compiler.errors import IrError
from mlsdc.compiler.module import Module

DiGraph: TypeAlias = Any  # networkx.DiGraph
KINDS = ("ngram", "medusa", "eagle", "model", "self")


def verifiers(module: Module) -> dict[str, str]:
    """Level name -> name of the level that verifies it, for all but the target."""
    levels = module.levels
    return {level.name: str(level.params.get("verified_by", after.name)) for level, after in zip(levels, levels[1:], strict=False)}


def cascade_graph(module: Module) -> DiGraph:
    """A `networkx.DiGraph` of level names, edges from a drafter to its verifier."""
    import networkx

    graph = networkx.DiGraph(name=module.name)
    graph.add_nodes_from(level.name for level in module.levels)
    graph.add_edges_from(verifiers(module).items())
    return graph


def stages(module: Module) -> tuple[tuple[str, ...], ...]:
    """Levels that run together, cheapest first: ((merged, merged), (level,), (target,)). Call `check_cascade` first."""
    import networkx

    target = module.target.name
    distance = networkx.shortest_path_length(cascade_graph(module), target=target)
    names = [level.name for level in module.levels]
    return tuple(tuple(n for n in names if distance[n] == d) for d in range(max(distance.values()), -1, -1))


def check_cascade(module: Module) -> None:
    """Raises IrError unless names are unique, kinds known, the target is a model and last, and every level's drafts reach it."""
    import networkx

    if not module.levels:
        raise IrError(f"module '{module.name}' has no levels; the last level is the target")
    names = [level.name for level in module.levels]
    for level in module.levels:
        if names.count(level.name) > 1:
            raise IrError(f"level '{level.name}' is defined twice")
        if level.kind not in KINDS:
            raise IrError(f"level '{level.name}': kind '{level.kind}' is not one of {', '.join(KINDS)}")
    target = module.target
    if target.kind != "model":
        raise IrError(f"level '{target.name}' is last, so it is the target, but its kind is '{target.kind}', expected model")
    if "verified_by" in target.params:
        raise IrError(f"level '{target.name}' is the target: nothing verifies it, found verified_by '{target.params['verified_by']}'")
    for name, verifier in verifiers(module).items():
        if verifier not in names:
            raise IrError(f"level '{name}' is verified by '{verifier}', which is not a level; levels are {', '.join(names)}")
    graph = cascade_graph(module)
    if not networkx.is_directed_acyclic_graph(graph):
        cycle = [edge[0] for edge in networkx.find_cycle(graph)]
        raise IrError(f"levels verify each other in a circle: {' -> '.join((*cycle, cycle[0]))}")
