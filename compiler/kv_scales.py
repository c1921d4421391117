"""Scales that a checkpoint brings for its KV cache: found under every name they are given, checked, and never taken for 1.0.

The formats of this compiler scale every token and head by what is in it, so a checkpoint's own scales change no byte of the cache. They say
how large its author saw keys and values become, and `check-kv-outliers` uses them as calibration maxima. A checkpoint that has some of them
and not all, or one that is no scale at all, is damaged or of a kind that is not understood: the compile fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlsdc.compiler.capture.source import ModelSource, WeightSource
from mlsdc.compiler.errors import CaptureError

FP8_MAX = 448.0  # the largest e4m3: a scale takes the largest value it was calibrated on there
FILES = ("kv_cache_scales.json", "kv_cache_scaling.json")

# of a tensor's name: the layer, and k, v or kv for both
STYLES: Mapping[str, re.Pattern[str]] = {
    "attention": re.compile(r"\blayers\.(\d+)\.self_attn\.(?:attn\.)?([kv]|kv)_scale$"),
    "projection": re.compile(r"\blayers\.(\d+)\.self_attn\.([kv])_proj\.(?:[kv]_scale|output_scale)$"),
    "fused": re.compile(r"\blayers\.(\d+)\.self_attn\.qkv_proj\.([kv])_scale$"),
}


@dataclass(frozen=True)
class KvScales:
    """Scales by layer, f32[1] or f32[kv_heads]; `style` is how the checkpoint names them."""

    style: str
    keys: Mapping[int, NDArray[np.float32]] = field(compare=False)
    values: Mapping[int, NDArray[np.float32]] = field(compare=False)

    def largest_key(self, layer: int) -> float:
        """The largest |key| the scales were made for."""
        return float(self.keys[layer].max()) * FP8_MAX


def scale_name(name: str) -> tuple[str, int, str] | None:
    """(style, layer, `k`, `v` or `kv`) of a tensor that is a KV scale by its name."""
    for style, pattern in STYLES.items():
        if found := pattern.search(name):
            return style, int(found[1]), found[2]
    return None


def read_kv_scales(weights: WeightSource, folder: Path | None, num_layers: int, num_kv_heads: int, label: str) -> KvScales | None:
    """The checkpoint's scales, from its tensors or from a JSON file beside them; None if it has none.

    Raises CaptureError naming layer and value for one that is not a positive finite number, has another shape than one a tensor or one a
    head, is given twice, or is missing.
    """
    found: dict[str, dict[int, NDArray[np.float32]]] = {"k": {}, "v": {}}
    styles = {}
    for where, style, layer, which, values in (*from_tensors(weights), *from_file(folder)):
        checked = check(values, f"{label}: {where}", layer, num_layers, num_kv_heads)
        styles[style] = where
        for half in which:
            if layer in found[half]:
                raise CaptureError(f"{label}: {where}: layer {layer} has a scale of its {NAMES[half]} already")
            found[half][layer] = checked
    if not styles:
        return None
    if len(styles) > 1:
        first, second = list(styles.values())[:2]
        raise CaptureError(f"{label}: KV scales are named in two ways, '{first}' and '{second}': expected one")
    for half, scales in found.items():
        missing = sorted(set(range(num_layers)) - set(scales))
        if missing:
            raise CaptureError(f"{label}: layer {missing[0]} has no scale of its {NAMES[half]}, {len(scales)} of {num_layers} layers have "
                               "one; the checkpoint is incomplete (a missing scale is not 1.0)")
    return KvScales(next(iter(styles)), found["k"], found["v"])


def kv_facts(source: ModelSource, folder: Path | None, format: str) -> dict[str, tuple[float, ...]]:
    """The checkpoint's scales are checked, whatever the format; for one of fewer than 16 bits, what `check-kv-outliers` looks at.

    `folder` is where the checkpoint lies, if it is a folder. Raises CaptureError.
    """
    layers = int(source.config["num_hidden_layers"])
    heads = int(source.config.get("num_key_value_heads") or source.config["num_attention_heads"])
    scales = read_kv_scales(source.weights, folder, layers, heads, source.label)
    return {} if format == "bf16" else key_norms(source.weights, scales, layers)


def key_norms(weights: WeightSource, scales: KvScales | None, num_layers: int) -> dict[str, tuple[float, ...]]:
    """Numbers a layer that tell of unusual keys: the norms of what projects them, where it lies under its usual name, and what a
    checkpoint's scales say."""
    found: dict[str, dict[int, float]] = {}
    for name in weights.names():
        if match := re.search(r"\blayers\.(\d+)\.self_attn\.k_proj\.(bias|weight)$", name):
            found.setdefault(f"the norm of its keys' {match[2]}", {})[int(match[1])] = float(np.linalg.norm(weights.read(name)))
    if scales is not None:
        found["the largest key it was calibrated for"] = {layer: scales.largest_key(layer) for layer in scales.keys}
    return {what: tuple(norms[layer] for layer in range(num_layers)) for what, norms in found.items() if len(norms) == num_layers}


NAMES = {"k": "keys", "v": "values"}
Found = tuple[str, str, int, str, Any]  # where it stands, style, layer, k or v or kv, values


def from_tensors(weights: WeightSource) -> Iterator[Found]:
    for name in weights.names():
        if parsed := scale_name(name):
            style, layer, which = parsed
            yield f"tensor '{name}'", style, layer, which, weights.read(name)


def from_file(folder: Path | None) -> Iterator[Found]:
    """`{"kv_cache": {"dtype": .., "scaling_factor": {rank: {layer: scale}}}}`; with `k` and `v` below the rank they differ."""
    for name in FILES if folder is not None and folder.is_dir() else ():
        assert folder is not None
        path = folder / name
        if not path.is_file():
            continue
        try:
            factors = json.loads(path.read_text(encoding="utf-8"))["kv_cache"]["scaling_factor"]
            ranks = {str(rank): dict(layers) for rank, layers in factors.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise CaptureError(f"{name}: expected kv_cache.scaling_factor with scales by rank and layer "
                               f"({type(error).__name__}: {error})") from None
        if len(ranks) != 1:
            raise CaptureError(f"{name}: scales of {len(ranks)} ranks, expected those of one: merge them first")
        (layers,) = ranks.values()
        halves = {"k": layers["k"], "v": layers["v"]} if set(layers) == {"k", "v"} else {"kv": layers}
        for which, scales in halves.items():
            for layer, value in scales.items():
                if not str(layer).isdecimal():
                    raise CaptureError(f"{name}: layer '{layer}', expected a number")
                yield f"{name}, layer {layer}", "file", int(layer), which, value


def check(values: Any, where: str, layer: int, num_layers: int, num_kv_heads: int) -> NDArray[np.float32]:
    """The scales of one layer as f32[1] or f32[kv_heads]. Raises CaptureError."""
    if layer >= num_layers:
        raise CaptureError(f"{where}: layer {layer}, the model has {num_layers}")
    try:
        scales = np.asarray(values, np.float32).reshape(-1)
    except (TypeError, ValueError):
        raise CaptureError(f"{where}: layer {layer}: {values!r} is not a scale, expected a number or one a head") from None
    if len(scales) not in (1, num_kv_heads):
        shape = list(np.shape(values))
        raise CaptureError(f"{where}: layer {layer}: shape {shape}, expected one scale, or one for each of {num_kv_heads} heads")
    for scale in scales.tolist():
        if not (0 < scale < float("inf")):
            raise CaptureError(f"{where}: layer {layer}: scale {scale:g}, expected a positive finite number")
    return scales
