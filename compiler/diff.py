"""Comparing what an artifact computes with what it should: node by node with the interpreter, layer by layer with transformers.

Two errors tell different things. The *own* error of a node is how far it is from the reference computed from the node's *native* inputs: it
is float error everywhere but where something is broken, so the first node whose own error is too large is where to look. The *total* error
is how far it is from a reference that never saw a native value: it grows along the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import numpy as np
import torch

from mlsdc.compiler.graph import Graph, Input, Node, Weight
from mlsdc.compiler.interpret import check, evaluate, given, interpret
from mlsdc.compiler.interpret_core import Context, Value
from mlsdc.compiler.interpret_state import Array, KvState, fill_page
from mlsdc.compiler.ops_kv import PagedAttention
from mlsdc.compiler.quantise import A8, A16
from mlsdc.compiler.types import DType, TensorType
from mlsdc.runtime.kv_format import from_bf16

A8_CODES = 1.001  # quantised values may differ by one code of their group: a tie that rounds the other way
BF16 = 2.0**-7  # cached values may differ by one rounding
FLOAT = 2e-4  # everything else, relative to the largest element
LAYER_FLOOR, LAYER_TIMES = 0.08, 4.0  # of a layer against transformers: int8 costs 1 to 4 %, and about the same in all layers


@dataclass(frozen=True)
class Line:
    """One compared value. Errors are relative to the largest reference element; nan where there is nothing to compare."""

    node: str
    kernel: str
    own: float
    total: float
    allowed: float

    @property
    def bad(self) -> bool:
        return not self.own <= self.allowed and not np.isnan(self.own)


def compare_nodes(graph: Graph, inputs: Mapping[str, Any], weights: Callable[[Node], Any],
                  native: Iterable[tuple[str, str, Any]]) -> tuple[list[Line], dict[str, Value]]:
    """Every node that `native` gives (node, kernel, value) for, in the graph's order; and the reference's values by node."""
    cached: dict[str, Any] = {}

    def weight(node: Node) -> Any:
        if node.name not in cached:
            cached[node.name] = weights(node)
        return cached[node.name]

    reference: dict[str, Value] = {}
    interpret(graph, inputs, weight, taps=reference)
    found = {node: (kernel, value) for node, kernel, value in native}
    context, values, sizes = Context(torch.float32), dict[str, Value](), dict[str, int]()
    lines = []
    with torch.no_grad():
        for node in graph:
            if isinstance(node.op, Input | Weight):
                values[node.name] = given(node, inputs, weight, context)
                continue
            wanted = evaluate(node, values, context)
            check(node, wanted, sizes, context)
            kernel, value = found.get(node.name, ("", None))
            if value is None:
                values[node.name] = wanted
                continue
            values[node.name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            own, total = (error(values[node.name], other) for other in (wanted, reference[node.name]))
            lines.append(Line(node.name, kernel, own, total, allowed(node, wanted)))
    return lines, reference


def allowed(node: Node, wanted: Value) -> float:
    if isinstance(wanted, KvState):
        return BF16
    if isinstance(wanted, A8 | A16):
        scales = wanted.scales if isinstance(wanted, A8) else wanted.high.scales
        return A8_CODES * float(scales.max(initial=0)) / float(np.abs(wanted.dequantise()).max(initial=1e-30))
    if isinstance(node.type, TensorType) and node.type.dtype is DType.I32:
        return 0.0
    return 1e-3 if isinstance(node.op, PagedAttention) else FLOAT


def error(value: Value, wanted: Value) -> float:
    """Largest difference relative to the largest wanted element; for integers the share that differs.

    A cache that quantises groups is compared in 16 bits, and its pages with what these quantise to: one rounding may tip a code.
    """
    if isinstance(value, KvState) and isinstance(wanted, KvState) and value.recent is not None and not filled_right(value, wanted):
        return float("inf")
    a, b = plain(value), plain(wanted)
    if a.dtype.kind in "iub":
        return float((a.reshape(b.shape) != b).mean()) if b.size else 0.0
    both = np.isfinite(b)
    if not np.isfinite(a.reshape(b.shape)[both]).all():
        return float("inf")
    top = np.abs(b[both]).max(initial=0.0)
    return float(np.abs(a.reshape(b.shape)[both] - b[both]).max(initial=0.0) / max(float(top), 1e-30))


def filled_right(value: KvState, wanted: KvState) -> bool:
    """Whether pages that `wanted` has filled are, in `value`, the bytes that its own tokens' 16-bit forms quantise to."""
    geometry = value.geometry
    assert value.recent is not None
    for index, layer in np.ndindex(len(wanted.pool), geometry.num_layers):
        part = slice(geometry.k_offset(layer, 0), geometry.k_offset(layer, 0) + geometry.num_kv_heads * geometry.layer_bytes(layer)[2])
        if wanted.pool[index, part].any():
            page = value.pool[index].copy()
            fill_page(geometry, page, layer, value.recent[index, layer])
            if not np.array_equal(page, value.pool[index]):
                return False
    return True


def plain(value: Value) -> Array:
    if isinstance(value, KvState):
        if value.recent is not None:
            return np.asarray(from_bf16(value.recent))
        geometry = value.geometry
        blocks = (geometry.read(page, layer, head) for page in value.pool
                  for layer in range(geometry.num_layers) for head in range(geometry.num_kv_heads))
        return np.stack([np.stack(pair) for pair in blocks])
    if isinstance(value, A8 | A16):
        return value.dequantise()
    return np.asarray(value)


@dataclass(frozen=True)
class LayerLine:
    """A layer's output (or the embedding) against transformers. `own` is relative to what the layer adds to its input, `total` to its
    output; both are means over rows of root mean squares: one row's huge activation must not hide the others."""

    layer: str
    own: float
    total: float
    bad: bool = False


def compare_layers(model: Any, tokens: Sequence[int], native: Mapping[str, Array], out_rows: Sequence[int]) -> list[LayerLine]:
    """Embedding and layers of a Hugging Face decoder. `native` maps node names (`embed`, `layers.3.mlp.residual`) to f32[rows, hidden].

    The own error of layer i is that of the Hugging Face layer fed with the native output of layer i - 1.
    """
    layers = list(model.model.layers)
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        states = hidden_states(model, layers, ids)
    names = ["embed", *(f"layers.{i}.mlp.residual" for i in range(len(layers)))]
    with torch.no_grad():
        own = hidden_states(model, layers, ids, {i: native[name] for i, name in enumerate(names[:-1])})
    lines = []
    for i, name in enumerate(names):
        if name not in native:
            continue
        rows: Sequence[int] | slice = slice(None) if len(native[name]) == len(tokens) else out_rows
        wanted = own[i][rows]
        base = native[names[i - 1]][rows] if i else np.zeros_like(wanted)
        lines.append(LayerLine(name, by_row(native[name] - wanted, wanted - base), by_row(native[name] - states[i][rows], states[i][rows])))
    usual = median_low([line.own for line in lines[1:]]) if len(lines) > 1 else 0.0
    bound = max(LAYER_FLOOR, LAYER_TIMES * usual)
    return [LayerLine(line.layer, line.own, line.total, not line.own <= bound) for line in lines]


def hidden_states(model: Any, layers: Sequence[Any], ids: torch.Tensor, forced: Mapping[int, Array] | None = None) -> list[Array]:
    """What goes into layer 0 and what comes out of every layer; with `forced`, layer i gets forced[i] instead of what came before it."""
    seen: dict[int, Array] = {}
    hooks = []

    def into(i: int) -> Callable[..., Any]:
        def hook(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if i == 0:
                seen[0] = args[0][0].numpy().copy()
            given_ = (forced or {}).get(i)
            return args if given_ is None or len(given_) != args[0].shape[1] else (torch.from_numpy(given_)[None], *args[1:])
        return hook

    def out_of(i: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            seen[i + 1] = (output[0] if isinstance(output, tuple) else output)[0].numpy().copy()
        return hook

    for i, layer in enumerate(layers):
        hooks += [layer.register_forward_pre_hook(into(i)), layer.register_forward_hook(out_of(i))]
    try:
        model.model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [seen[i] for i in range(len(layers) + 1)]


def by_row(difference: Array, scale: Array) -> float:
    """Mean over rows of rms(difference) / rms(scale)."""
    top, bottom = (np.sqrt((x.astype(np.float64) ** 2).mean(-1)) for x in (difference, scale))
    return float((top / np.maximum(bottom, 1e-30)).mean())


@dataclass(frozen=True)
class Logits:
    """Means over rows: KL(reference || artifact) in nats, and how often the likeliest token is the same."""

    rows: int
    kl: float
    top1: float


def compare_logits(native: Array, reference: Array) -> Logits:
    """f32[rows, vocab] each."""
    wanted = torch.log_softmax(torch.from_numpy(np.ascontiguousarray(reference)).double(), -1)
    found = torch.log_softmax(torch.from_numpy(np.ascontiguousarray(native)).double(), -1)
    kl = float((wanted.exp() * (wanted - found)).sum(-1).mean())
    return Logits(len(native), kl, float((wanted.argmax(-1) == found.argmax(-1)).double().mean()))
