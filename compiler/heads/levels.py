"""From a cascade's heads to levels: open the file, check it against the target, and make programs and params of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlsdc.compiler.capture import ModelSource, WeightSource
from mlsdc.compiler.config import Config
from mlsdc.compiler.config_levels import HeadsConfig
from mlsdc.compiler.errors import CaptureError, HeadError
from mlsdc.compiler.graph import Graph, Weight
from mlsdc.compiler.heads.checkpoint import HeadFile
from mlsdc.compiler.heads.config import EagleConfig, MedusaConfig
from mlsdc.compiler.heads.graphs import Lent, head_graphs
from mlsdc.compiler.heads.open import open_heads
from mlsdc.compiler.heads.source import LENT, HeadWeights
from mlsdc.compiler.module import LevelModule
from mlsdc.compiler.ops_nn import Embed, Linear
from mlsdc.compiler.types import TensorType
from mlsdc.runtime.step import Limits


@dataclass(frozen=True)
class LevelParts:
    """What a drafting level with programs is made of. `files` are more files of the artifact, path -> bytes."""

    graphs: Mapping[str, Graph] = field(default_factory=dict)
    weights: WeightSource | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


def open_level_files(config: Config, source: ModelSource) -> dict[str, HeadFile]:
    """Level name -> its heads, checked against the target. Raises ConfigError at the level's place in the file."""
    found = {}
    for path, level in config.drafters():
        if not isinstance(level, HeadsConfig):
            continue
        try:
            found[level.name] = open_heads(Path(config.folder) / level.heads, level.kind, source)
            check_fits(found[level.name], level.kind, source)
        except (HeadError, CaptureError) as error:
            config.fail(f"{path}.heads", str(error))
    return found


def check_fits(file: HeadFile, kind: str, source: ModelSource) -> None:
    """Raises HeadError for heads of another model."""
    c = file.config
    if c.kind != kind:
        raise HeadError(f"{file.label}: is a head of kind '{c.kind}', the level wants one of kind '{kind}'")
    for what, found, wanted in (("hidden size", c.target_hidden, int(source.config["hidden_size"])),
                                ("vocabulary", c.vocab_size, int(source.config["vocab_size"]))):
        if found != wanted:
            raise HeadError(f"{file.label}: made for a model with {what} {found}, {source.label} has {wanted}: these are another model's "
                            "heads")
    layers = int(source.config["num_hidden_layers"])
    if max(c.taps) > layers:
        raise HeadError(f"{file.label}: reads the hidden state after layer {max(c.taps)}, {source.label} has {layers} layers: these are "
                        "another model's heads")


def head_level(file: HeadFile, level: HeadsConfig, graph: Graph, weights: WeightSource, limits: Limits) -> LevelParts:
    """Programs, weights and params of a level; `graph` is the target as captured, `weights` its checkpoint."""
    c = file.config
    lent = lent_names(graph)
    params: dict[str, Any] = {"taps": list(c.taps), "tap_width": c.target_hidden * len(c.taps), "d2t": f"heads/{level.name}.d2t"}
    params["widths"] = {"features": c.hidden_size, "draft_ids": len(file.d2t)} | ({"taps": params["tap_width"]} if fuses(c) else {})
    if isinstance(c, MedusaConfig):
        params["depth"] = min(level.depth, c.num_heads)
    files = {params["d2t"]: np.ascontiguousarray(file.d2t, "<i4").tobytes()}
    return LevelParts(head_graphs(c, lent, limits), HeadWeights(file, weights), params, files)


def fuses(c: EagleConfig | MedusaConfig) -> bool:
    return isinstance(c, EagleConfig) and c.style == "eagle3" and "fc" in c.shapes()


def lent_names(graph: Graph) -> Lent:
    """The checkpoint's names of the embedding, the head and the last norm of a captured target."""
    def source(name: str) -> str:
        op = graph[name].op
        return op.sources[0] if isinstance(op, Weight) else ""

    embed = next((source(node.inputs[1]) for node in graph if isinstance(node.op, Embed)), "")
    heads = [source(node.inputs[1]) for node in graph if isinstance(node.op, Linear)]
    norms = [node.op.sources[0] for node in graph.weights() if isinstance(node.op, Weight) and isinstance(node.type, TensorType)
             and node.type.rank == 1 and "norm" in node.op.sources[0]]
    if not embed or not heads or not norms:
        raise HeadError("the target has no embedding, head or last norm that heads could use")
    return Lent(embed, heads[-1], norms[-1])


def shared_weights(level: LevelModule, target: LevelModule) -> dict[str, str]:
    """The level's weights that lie in the target's file as they are: name -> the target's name for it."""
    own = {(node.op.sources, node.type): node.name for graph in target.graphs.values() for node in graph.weights()
           if isinstance(node.op, Weight)}
    found = {}
    for graph in level.graphs.values():
        for node in graph.weights():
            if isinstance(node.op, Weight) and (level.kind == "self" or all(name.startswith(LENT) for name in node.op.sources)):
                key = (tuple(name.removeprefix(LENT) for name in node.op.sources), node.type)
                if key in own:
                    found[node.name] = own[key]
    return found
