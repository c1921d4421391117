"""What a pass did to one graph, node by node: the viewer colours nodes by it."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.compiler.graph import Graph, Weight
from mlsdc.compiler.ops import Op
from mlsdc.compiler.types import Type


@dataclass(frozen=True)
class GraphChanges:
    """Node names. `changed` kept their name and got another op, inputs or type; `renamed` maps a new name to the old one of a node that
    is otherwise the same. `heirs` says which nodes took over what is `removed`.

    A node is *fused* when it is added or changed and is somebody's heir.
    """

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    renamed: dict[str, str]
    heirs: dict[str, tuple[str, ...]]  # heir -> removed nodes, in the old graph's order


def graph_changes(before: Graph, after: Graph) -> GraphChanges:
    """The difference of two graphs that are one pass apart. Weights are never heirs and never inherited."""
    old, new = before.by_name, after.by_name
    kept = same_nodes(before, after)
    now = set(kept.values())
    added = tuple(name for name in new if name not in old and name not in now)
    changed = tuple(name for name in new if name in old and name not in now)
    removed = tuple(name for name in old if name not in new and name not in kept)
    touched = {*added, *changed}
    heirs: dict[str, list[str]] = {}
    for name in removed:
        found = None if isinstance(old[name].op, Weight) else heir(before, kept, new.keys() & old.keys(), name)
        if found in touched:
            heirs.setdefault(found, []).append(name)
    renamed = {name: was for was, name in kept.items() if name != was}
    return GraphChanges(added, changed, removed, renamed, {name: tuple(gone) for name, gone in heirs.items()})


def same_nodes(before: Graph, after: Graph) -> dict[str, str]:
    """Old name -> new name of every node that has the same op, type and inputs in both; a node that kept its name is preferred."""
    places: dict[tuple[Op, Type, tuple[str, ...]], dict[str, None]] = {}
    for node in after:
        places.setdefault((node.op, node.type, node.inputs), {})[node.name] = None
    kept: dict[str, str] = {}
    for node in before:
        free = places.get((node.op, node.type, tuple(kept.get(name, name) for name in node.inputs)), {})
        chosen = node.name if node.name in free else next((name for name in free if name not in before.by_name), None)
        if chosen is not None:
            kept[node.name] = chosen
            del free[chosen]
    return kept


def heir(before: Graph, kept: dict[str, str], surviving: set[str], name: str) -> str:
    """The first node that the removed value flowed into and that is still there, by its new name; "" if there is none."""
    seen, pending = {name}, [name]
    while pending:
        for user in before.users[pending.pop(0)]:
            if user in kept or user in surviving:
                return kept.get(user, user)
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return ""
