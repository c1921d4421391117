"""Drafting levels that are decoders: a smaller model with its own checkpoint, and the target's first layers with an exit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mlsdc.compiler.capture import ModelSource, WeightSource, load_source
from mlsdc.compiler.config import Config
from mlsdc.compiler.config_kv import KvFormats
from mlsdc.compiler.config_levels import ModelConfig, SelfConfig
from mlsdc.compiler.errors import CaptureError, HeadError
from mlsdc.compiler.graph import Graph
from mlsdc.compiler.heads.checkpoint import HeadFile
from mlsdc.compiler.heads.config import MedusaConfig
from mlsdc.compiler.heads.levels import LevelParts, check_fits
from mlsdc.compiler.heads.open import open_heads
from mlsdc.compiler.heads.source import HeadWeights
from mlsdc.compiler.vocabulary import check_vocabulary
from mlsdc.runtime.kv_format import KvFormat, parse_format
from mlsdc.runtime.step import Limits


def model_level(config: Config, path: str, level: ModelConfig, target: ModelSource, limits: Limits) -> LevelParts:
    """A smaller model's program, weights and params. Raises ConfigError at `path`."""
    from mlsdc.compiler.capture.torch_export import capture_model

    try:
        source = load_source(level.model, config.folder)
    except CaptureError as error:
        config.fail(f"{path}.model", str(error))
    check_layers(config, path, level.kv, source)
    try:
        changed = read_map(config.folder / level.vocabulary_map) if level.vocabulary_map else {}
        ids = check_vocabulary(target, source, changed)
    except HeadError as error:
        config.fail(f"{path}.vocabulary_map" if level.vocabulary_map else f"{path}.model", str(error))
    trained = int(source.config["max_position_embeddings"])
    context = min(level.context or trained, trained, limits.max_model_len)
    captured = capture_model(source, max_tokens=max(context, 2), name="draft")
    params: dict[str, Any] = {"context": context}
    files = {}
    if ids is not None:
        params["d2t"] = f"heads/{level.name}.d2t"
        files[params["d2t"]] = np.ascontiguousarray(ids, "<i4").tobytes()
        params["widths"] = {"draft_ids": len(ids)}
    return LevelParts({"draft": captured.graph}, captured.weights, params, files)


def check_layers(config: Config, path: str, kv: KvFormats, source: ModelSource) -> None:
    """That a cache skips no layers that the model does not have. Raises ConfigError at `path`.kv."""
    count = int(source.config["num_hidden_layers"])
    if wrong := [layer for layer in kv.skip_layers if layer >= count]:
        config.fail(f"{path}.kv.skip_layers", f"there is no layer {wrong[0]}: the model has {count}, counted from 0")


def read_map(path: Path) -> dict[int, int]:
    """{draft token id: target token id}. Raises HeadError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return {int(draft): int(target) for draft, target in raw.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HeadError(f"{path.name}: not a vocabulary map ({reason}); expected {{\"draft id\": target id}}") from None


def open_exit(config: Config, path: str, level: SelfConfig, source: ModelSource) -> HeadFile | None:
    """The level's exit, checked. Raises ConfigError at `path`."""
    layers = int(source.config["num_hidden_layers"])
    if level.layers >= layers:
        config.fail(f"{path}.layers", f"{level.layers}, but {source.label} has {layers} layers; a level of its first layers has fewer")
    if level.kv is not None and not any("int8n" in (kv.keys.name, kv.values.name) for kv in formats(config, level.layers)):
        config.fail(f"{path}.kv", f"'{level.kv}' reads the high nibbles of an int8n cache, the target's is {config.target.kv.format}")
    if level.exit is None:
        return None
    try:
        file = open_heads(config.folder / level.exit, "exit", source)
        check_fits(file, "exit", source)
        if file.config.taps != (level.layers,):
            raise HeadError(f"{file.label}: is an exit after layer {file.config.taps[0]}, the level has {level.layers} layers")
    except (HeadError, CaptureError) as error:
        config.fail(f"{path}.exit", str(error))
    return file


def formats(config: Config, layers: int) -> list[KvFormat]:
    """Of the target's cache in its first layers."""
    kv, others = parse_format(config.target.kv.format)
    return [others.get(layer, kv) for layer in range(layers)]


def self_level(level: SelfConfig, file: HeadFile | None, graph: Graph, weights: WeightSource) -> LevelParts:
    """The target's program, which `guess-top` cuts; weights are the target's where they are the same."""
    params: dict[str, Any] = {"kv_of": "target"}
    if file is None:
        return LevelParts({"draft": renamed(graph)}, weights, params)
    assert isinstance(file.config, MedusaConfig)
    params |= {"draft_vocab": file.config.draft_vocab, "d2t": f"heads/{level.name}.d2t", "widths": {"draft_ids": len(file.d2t)}}
    files = {params["d2t"]: np.ascontiguousarray(file.d2t, "<i4").tobytes()}
    return LevelParts({"draft": renamed(graph)}, HeadWeights(file, weights), params, files)


def renamed(graph: Graph) -> Graph:
    return Graph("draft", graph.nodes, graph.outputs)
