"""What a captured graph reads and what its checkpoint holds: names brought together, and every tensor accounted for."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from mlsdc.compiler.capture.source import ModelSource, WeightSource
from mlsdc.compiler.errors import CaptureError
from mlsdc.compiler.graph import Graph, Node, Weight
from mlsdc.compiler.kv_scales import scale_name
from mlsdc.compiler.types import TensorType


def under_checkpoint_names(graph: Graph, module: nn.Module, source: ModelSource) -> Graph:
    """The graph with its weights' sources named as the checkpoint names them.

    Checkpoints from before transformers 5 hold every expert by itself; transformers has a table of how such names become a module's.
    A weight that is many tensors there gets all of them as its sources, in order, so that they are read one by one.
    """
    wanted = {name for node in graph.weights() for name in sources(node)}
    held = source.weights.names()
    if wanted <= set(held):
        return graph
    parts = converted(module, [name for name in held if name not in wanted], source.label)
    nodes = []
    for node in graph:
        if isinstance(node.op, Weight):
            node = replace(node, op=Weight(tuple(part for name in node.op.sources for part in parts.get(name, (name,)))))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def converted(module: nn.Module, names: Sequence[str], label: str) -> dict[str, tuple[str, ...]]:
    """Tensor of the module -> the checkpoint's tensors that make it, one below the other, by transformers' table."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:
        return {}
    table: Any = get_model_conversion_mapping(module)
    renamings = [rule for rule in table if not isinstance(rule, WeightConverter)]
    converters = [rule for rule in table if isinstance(rule, WeightConverter)]
    found: dict[str, dict[str, list[str]]] = {}
    used: dict[str, Any] = {}
    for name in sorted(names, key=natural):
        renamed = name
        for rule in renamings:
            renamed = rule.rename_source_key(renamed)[0]
        for rule in converters:
            target, pattern = rule.rename_source_key(renamed)
            if pattern is not None:
                found.setdefault(target, {pattern: [] for pattern in rule.source_patterns})[pattern].append(name)
                used[target] = rule
                break
        else:
            found[renamed] = {"": [name]}
    return {target: in_order(target, groups, used.get(target), label) for target, groups in found.items()}


def in_order(target: str, groups: dict[str, list[str]], rule: Any, label: str) -> tuple[str, ...]:
    """Of every expert its parts: what merging along axis 0 and then concatenating along axis 1 lays one below the other."""
    steps = [(type(step).__name__, getattr(step, "dim", 0)) for step in rule.operations] if rule is not None else []
    if steps not in ([], [("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
        made = ", ".join(f"{name}(dim={dim})" for name, dim in steps)
        raise CaptureError(f"{label}: '{target}' is made of '{next(iter(groups.values()))[0]}' ... by {made}, which cannot be read yet")
    lengths = {len(names) for names in groups.values()}
    if len(lengths) > 1:
        counts = ", ".join(f"{len(names)} of '{pattern}'" for pattern, names in groups.items())
        raise CaptureError(f"{label}: '{target}' is made of {counts}; tensors are missing")
    return tuple(name for parts in zip(*groups.values(), strict=True) for name in parts)


def natural(name: str) -> tuple[Any, ...]:
    """`experts.10` after `experts.9`."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name))


def sources(node: Node) -> tuple[str, ...]:
    return node.op.sources if isinstance(node.op, Weight) else ()


def check_weights(graph: Graph, weights: WeightSource, label: str) -> None:
    """Raises CaptureError for the first weight node that `weights` cannot fill."""
    names = set(weights.names())
    for node in graph.weights():
        for name in sources(node):
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                raise CaptureError(f"{label}: has no tensor '{name}'" + (f"; the nearest is '{near[0]}'" if near else ""))
            check_shape(node, name, weights.shape(name), label)


def check_shape(node: Node, name: str, found: tuple[int, ...], label: str) -> None:
    """One source must have the node's shape; of several each has its share of the rows."""
    assert isinstance(node.type, TensorType)
    wanted = tuple(size for size in node.type.shape if isinstance(size, int))
    count = len(sources(node))
    if found[1:] != wanted[1:] or math.prod(found) * count != math.prod(wanted):
        parts = f" in {count} parts" if count > 1 else ""
        raise CaptureError(f"{label}: tensor '{name}' has shape {list(found)}, the model expects {list(wanted)}{parts}")


_NEVER_READ = (r"rotary_emb\.inv_freq$", r"attn\.(masked_)?bias$", r"^lm_head\.weight$")


def check_unused(graph: Graph, module: nn.Module, source: ModelSource) -> None:
    """Raises CaptureError for tensors that the model does not read: then it is another model than config.json says (a bias too many, ...).

    What old checkpoints carry for nothing (inv_freq, masks, the copy of a tied head) and what transformers lists as ignored may be there,
    and scales of a KV cache, which are read elsewhere (compiler/kv_scales.py).
    """
    read = {name.removesuffix("^T") for node in graph.weights() for name in sources(node)}
    ignored = [*_NEVER_READ, *(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())]
    unused = [name for name in source.weights.names()
              if name not in read and scale_name(name) is None and not any(re.search(p, name) for p in ignored)]
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise CaptureError(f"{source.label}: has tensor '{unused[0]}'{more}, which the model of its config does not read")
