"""How much a layer's attention changes when its keys are quantised: measured on calibration tokens, before any bytes are written.

The error of the keys says little (a few huge channels can make it look small, FIELD C1, C2), so what is compared is what attention does
with them: the mean KL divergence of a row's weights over its positions. A layer is an outlier if it loses `FACTOR` times what the layers'
median loses and more than `LEAST`, or more than `MOST` whatever the others do; or if the bias or the weight of its keys, or the scale that
its author calibrated, is `NORMS` times the layers' median. An outlier's keys get more bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from mlsdc.runtime.kv_blocks import Block
from mlsdc.runtime.kv_format import KvFormat, format_named, format_text, parse_format

F32 = NDArray[np.float32]
FACTOR, LEAST, MOST = 8.0, 0.02, 0.5  # nats
NORMS = 10.0
LADDER: Mapping[str, tuple[str, ...]] = {  # what the keys of an outlier are tried in, fewest bits first
    "int2": ("int4", "int8", "bf16"), "int3": ("int4", "int8", "bf16"), "int4": ("int8", "bf16"), "int4-token": ("int8", "bf16"),
    "fp8": ("int8", "bf16"), "int8": ("bf16",),
}


@dataclass(frozen=True)
class Layer:
    """A layer's queries [tokens, heads, d] and keys [tokens, kv_heads, d] after RoPE, and the attention's scale."""

    q: F32
    k: F32
    scale: float


@dataclass(frozen=True)
class Outlier:
    """A layer whose keys get another format, and why."""

    layer: int
    why: str
    found: str
    given: str

    def __str__(self) -> str:
        return f"layer {self.layer}: {self.why}: keys {self.given} instead of {self.found}"


def restored(block: Block, x: F32, page_size: int) -> F32:
    """x[tokens, d] written to pages of a format and read back."""
    tokens, dim = x.shape
    padded = np.concatenate([x, np.repeat(x[-1:], -tokens % page_size, axis=0)])
    found = []
    for first in range(0, len(padded), page_size):
        page = np.zeros(block.block_bytes(page_size, dim), np.uint8)
        block.write_group(page, padded[first : first + page_size])
        found.append(block.read(page, dim))
    return np.concatenate(found)[:tokens]


def weights(q: F32, k: F32, scale: float) -> NDArray[np.float64]:
    """Causal attention weights [heads, tokens, tokens]."""
    tokens, heads, _ = q.shape
    shared = np.repeat(k, heads // k.shape[1], axis=1).astype(np.float64)
    scores = q.astype(np.float64).transpose(1, 0, 2) @ shared.transpose(1, 2, 0) * scale
    scores[:, np.triu(np.ones((tokens, tokens), bool), 1)] = -np.inf
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(scores / scores.sum(-1, keepdims=True))


def loss(layer: Layer, kv: KvFormat, page_size: int) -> float:
    """Mean KL divergence, in nats, of the attention weights over quantised keys from those over exact ones. All keys are quantised."""
    quantised = np.stack([restored(kv.keys, np.ascontiguousarray(layer.k[:, head]), page_size) for head in range(layer.k.shape[1])], axis=1)
    p, found = weights(layer.q, layer.k, layer.scale), weights(layer.q, quantised, layer.scale)
    terms = np.where(p > 0, p * (np.log(np.maximum(p, 1e-300)) - np.log(np.maximum(found, 1e-300))), 0.0)
    return float(terms.sum(-1).mean())


def outliers(layers: Sequence[Layer], text: str, page_size: int, norms: Mapping[str, Sequence[float]]) -> list[Outlier]:
    """Layers whose keys need more bits than the format `text` (runtime.kv_format.parse_format) gives them.

    `norms` are numbers a layer by name, e.g. `norm of the keys' bias`.
    """
    kv, others = parse_format(text)
    formats = [others.get(i, kv) for i in range(len(layers))]
    losses = [loss(layer, kv, page_size) if kv.keys.name in LADDER else 0.0 for layer, kv in zip(layers, formats, strict=True)]
    counted = [found for found, kv in zip(losses, formats, strict=True) if kv.keys.name in LADDER]
    if not counted:
        return []
    usual = median(counted)
    bound = min(MOST, max(LEAST, FACTOR * usual))
    found = []
    for i, (layer, kv) in enumerate(zip(layers, formats, strict=True)):
        if kv.keys.name not in LADDER:
            continue
        why = [f"attention loses {losses[i]:.2g} nats, the median layer {usual:.2g}"] if losses[i] > bound else []
        for name, values in norms.items():
            middle = median(values)
            if values[i] > NORMS * middle > 0:
                why.append(f"{name} is {values[i]:.3g}, the median layer's {middle:.3g}")
        if why:
            found.append(Outlier(i, "; ".join(why), kv.keys.name, lifted(layer, kv, page_size, bound)))
    return found


def lifted(layer: Layer, kv: KvFormat, page_size: int, bound: float) -> str:
    """The first format of the ladder that loses no more than `bound`."""
    *tried, last = LADDER[kv.keys.name]
    return next((name for name in tried if loss(layer, format_named(f"{name}/{kv.values.name}"), page_size) <= bound), last)


def with_outliers(text: str, found: Sequence[Outlier]) -> str:
    """The format in which outliers' keys have what they need."""
    kv, others = parse_format(text)
    formats = {layer: other.name for layer, other in others.items()}
    for outlier in found:
        values = others.get(outlier.layer, kv).values.name
        formats[outlier.layer] = outlier.given if outlier.given == values else f"{outlier.given}/{values}"
    return format_text(kv.name, formats)
