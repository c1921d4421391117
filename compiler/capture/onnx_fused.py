"""onnxruntime's fused operators (com.microsoft) -> rows of a decoder: norms, RoPE, grouped attention, weights of few bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mlsdc.compiler.capture.onnx_file import NBits
from mlsdc.compiler.capture.onnx_rules import EMPTY, reads
from mlsdc.compiler.errors import CaptureError
from mlsdc.compiler.ops_core import Binary, Reshape, Slice, Transpose
from mlsdc.compiler.ops_nn import Attention, Linear, RmsNorm, Rope, RopeTable

if TYPE_CHECKING:
    from mlsdc.compiler.capture.onnx_graph import OnnxGraph

MOST_ERROR = 2e-3  # of a cosine in a table that may be f16


@reads("SimplifiedLayerNormalization", "com.microsoft.SimplifiedLayerNormalization", "RMSNormalization")
def rms_norm(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    x = c.value(node.input[0])
    if facts.get("axis", -1) % len(c.shape(x)) != len(c.shape(x)) - 1:
        raise CaptureError(f"{c.where(node)}: a norm from axis {facts['axis']} on; only over the last axis can be read")
    return c.add(RmsNorm(facts.get("epsilon", 1e-5)), x, c.value(node.input[1]))


@reads("com.microsoft.SkipSimplifiedLayerNormalization")
def skip_rms_norm(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> list[Any]:
    """Outputs: the norm of x + skip, two that inference leaves out, and x + skip."""
    total = c.add(Binary("add"), c.value(node.input[0]), c.value(node.input[1]))
    if len(node.input) > 3 and node.input[3]:
        total = c.add(Binary("add"), total, c.value(node.input[3]))
    return [c.add(RmsNorm(facts.get("epsilon", 1e-5)), total, c.value(node.input[2])), EMPTY, EMPTY, total]


@reads("com.microsoft.RotaryEmbedding")
def rotary(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    """x[1, seq, heads d] or x[1, heads, seq, d], positions, cosines and sines[length, r / 2]."""
    if facts.get("interleaved", 0):
        raise CaptureError(f"{c.where(node)}: turns interleaved channels; only halves can be read")
    x = c.value(node.input[0])
    table = rope_table(c, node, node.input[2], node.input[3])
    if len(c.shape(x)) == 4:
        _, heads, _, dim = c.shape(x)
        turned = c.add(Rope(), c.add(Reshape((-1, heads, dim)), c.add(Transpose(1, 2), x)), table)
        return c.add(Transpose(1, 2), c.add(Reshape((1, -1, heads, dim)), turned))
    width = c.shape(x)[-1]
    dim = facts.get("num_heads", 0) and width // facts["num_heads"] or 2 * c.shape(table)[-1]
    turned = c.add(Rope(), c.add(Reshape((-1, width // dim, dim)), x), table)
    return c.add(Reshape((1, -1, width)), turned)


def rope_table(c: OnnxGraph, node: onnx.NodeProto, cosines: str, sines: str) -> str:
    """The table of angles of each row; frequencies and scaling are those of the file's table of cosines and sines."""
    name = f"rope_table.{c.clean(cosines)}"
    if name in c.builder.nodes:
        return name
    inv_freq, scaling = frequencies(c, node, c.known.at(cosines, 7).astype(np.float64), c.known.at(sines, 7).astype(np.float64))
    return c.builder.add(name, RopeTable(scaling), c.positions(), c.constant(f"inv_freq.{cosines}", inv_freq))


def frequencies(c: OnnxGraph, node: onnx.NodeProto, cos: NDArray[Any], sin: NDArray[Any]) -> tuple[NDArray[np.float32], float]:
    """Frequencies f and scale s with cos[p, i] = s cos(p f_i), sin likewise. Raises CaptureError for other tables and too short ones."""
    if len(cos) < c.max_tokens:
        raise CaptureError(f"{c.where(node)}: its table has {len(cos)} positions, {c.max_tokens} tokens are asked for")
    scale = float(cos[0, 0])
    inv_freq = refined(cos, sin)
    angles = np.arange(len(cos), dtype=np.float64)[:, None] * inv_freq
    error = max(np.abs(scale * np.cos(angles) - cos)[: c.max_tokens].max(), np.abs(scale * np.sin(angles) - sin)[: c.max_tokens].max())
    if error > MOST_ERROR * scale:
        raise CaptureError(f"{c.where(node)}: its table is not of angles that grow with the position (it differs by {error:.2g})")
    return inv_freq.astype(np.float32), scale


def refined(cos: NDArray[Any], sin: NDArray[Any]) -> NDArray[np.float64]:
    """Frequencies from the angle at ever later positions: each makes the one before it exact enough to tell how many turns there were."""
    position, inv_freq = 1, np.arctan2(sin[1], cos[1])
    while position * 2 < len(cos):
        position *= 2
        turned = np.arctan2(sin[position], cos[position])
        whole = np.round((inv_freq * position - turned) / (2 * math.pi))
        inv_freq = (turned + 2 * math.pi * whole) / position
    return np.asarray(inv_freq, np.float64)


@reads("com.microsoft.GroupQueryAttention")
def grouped_attention(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> list[Any]:
    """q[1, seq, heads d] with k and v, or all three in one; a past that is empty; maybe RoPE by its own tables."""
    heads, kv_heads = facts["num_heads"], facts["kv_num_heads"]
    inputs = [*node.input, *[""] * 12]
    q = c.value(inputs[0])
    if inputs[1]:
        dim = c.shape(q)[-1] // heads
        q, k, v = q, c.value(inputs[1]), c.value(inputs[2])
    else:
        dim = c.shape(q)[-1] // (heads + 2 * kv_heads)
        first, second = heads * dim, (heads + kv_heads) * dim
        q, k, v = (c.add(Slice(2, a, b), q) for a, b in ((0, first), (first, second), (second, second + kv_heads * dim)))
    q, k, v = (c.add(Reshape((-1, count, dim)), x) for x, count in ((q, heads), (k, kv_heads), (v, kv_heads)))
    if facts.get("do_rotary", 0):
        if facts.get("rotary_interleaved", 0):
            raise CaptureError(f"{c.where(node)}: turns interleaved channels; only halves can be read")
        table = rope_table(c, node, inputs[7], inputs[8])
        q, k = c.add(Rope(), q, table), c.add(Rope(), k, table)
    if any(inputs[10:12]) or facts.get("smooth_softmax", 0):
        raise CaptureError(f"{c.where(node)}: an attention bias or sinks, which cannot be read")
    scale = facts.get("scale", 0.0) or 1.0 / math.sqrt(dim)
    window = max(0, facts.get("local_window_size", -1))
    out = c.add(Attention(scale, window, facts.get("softcap", 0.0)), q, k, v)
    return [c.add(Reshape((1, -1, heads * dim)), out), EMPTY, EMPTY]


@reads("com.microsoft.MatMulNBits")
def matmul_nbits(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    inputs = [*node.input, *[""] * 6]
    bits = facts.get("bits", 4)
    if bits not in (4, 8) or inputs[4]:
        raise CaptureError(f"{c.where(node)}: {bits} bits{' with reordered groups' if inputs[4] else ''}; 4 and 8 bits can be read")
    name = f"{inputs[1]}.unpacked"
    c.file.packed[name] = NBits(inputs[1], inputs[2], inputs[3], facts["N"], facts["K"], bits, facts["block_size"])
    return c.add(Linear(), c.value(inputs[0]), c.weight(name), *([c.value(inputs[5])] if inputs[5] else []))
