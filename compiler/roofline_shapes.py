"""Row programs of well-known decoders from their shapes alone, without a checkpoint: for the roofline, and to compile their kernels."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.compiler.errors import ConfigError
from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.ops_core import ArgMax, Binary, GatherRows, Reshape
from mlsdc.compiler.ops_kv import PagedAttention
from mlsdc.compiler.ops_nn import Embed, Gated, Linear, RmsNorm, RopeTable
from mlsdc.compiler.ops_quant import AppendKvSlice, GatedQuantise, LinearQ, NormQuantise, RopeSlice
from mlsdc.compiler.types import Dim, DType, KvType, TensorType, TreeType
from mlsdc.runtime.step import Limits

WEIGHTS = {"int8": DType.Q8, "int4": DType.Q4, "int4-a16": DType.Q4, "fp8": DType.F8, "bf16": DType.BF16}


@dataclass(frozen=True)
class Shape:
    """A Llama-like decoder: RMSNorm, RoPE on whole heads, grouped attention, a gated MLP."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False


SHAPES = {
    "llama-3.2-1b": Shape(2048, 8192, 16, 32, 8, 64, 128256, tied=True),
    "llama-3-8b": Shape(4096, 14336, 32, 32, 8, 128, 128256),
    "llama-3-70b": Shape(8192, 28672, 80, 64, 8, 128, 128256),
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 64, 49152, tied=True),
}


def shape_graph(shape: Shape, limits: Limits, weights: str = "int8", kv_format: str = "bf16", page_size: int = 32) -> Graph:
    """The target's row program as the default pipeline would leave it. Embeddings and head are int8 where weights are int4, bf16 where they
    are fp8. Raises ConfigError."""
    if weights not in WEIGHTS:
        raise ConfigError(f"weights: '{weights}' is not one of {', '.join(WEIGHTS)}")
    g = Builder("forward")
    rows, out = Dim("rows", 1, limits.max_num_batched_tokens), Dim("out", 1, limits.max_logit_rows)
    dtype = WEIGHTS[weights]
    head_dtype = {DType.Q4: DType.Q8, DType.F8: DType.BF16}.get(dtype, dtype)
    packed = weights in ("int8", "int4")
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def matrix(name: str, n: int, k: int, type_: DType = dtype) -> str:
        return g.weight(f"w.{name}", TensorType(type_, (n, k)))

    def norm(name: str, x: str) -> str:
        weight = g.weight(f"w.{name}", TensorType(DType.F32, (shape.hidden,)))
        return g.add(name, NormQuantise(1e-5) if packed else RmsNorm(1e-5), x, weight)

    def added(name: str, h: str, weight: str, x: str) -> str:
        if packed:
            return g.add(name, LinearQ(residual=True), h, weight, x)
        return g.add(name, Binary("add"), g.add(f"{name}.linear", Linear(), h, weight), x)

    tokens, positions = (g.input(name, TensorType(DType.I32, (rows,))) for name in ("tokens", "positions"))
    out_rows = g.input("out_rows", TensorType(DType.I32, (out,)))
    cache = g.input("kv", KvType(kv_format, page_size, shape.layers, shape.kv_heads, shape.head_dim))
    tree = g.input("tree", TreeType())
    embedding = matrix("embed", shape.vocab, shape.hidden, head_dtype)
    table = g.add("rope_table", RopeTable(), positions, g.weight("w.inv_freq", TensorType(DType.F32, (shape.head_dim // 2,))))
    x = g.add("embed", Embed(), tokens, embedding)
    linear = LinearQ() if packed else Linear()
    for i in range(shape.layers):
        at = f"layers.{i}"
        h = norm(f"{at}.attn_norm", x)
        qkv = g.add(f"{at}.attn.qkv", linear, h, matrix(f"{at}.attn.qkv", q + 2 * kv, shape.hidden))
        turned = g.add(f"{at}.attn.q_rope", RopeSlice(0, shape.heads, shape.head_dim), qkv, table)
        cache = g.add(f"{at}.attn.kv", AppendKvSlice(i, q, q + kv), cache, qkv, table, tree)
        attend = g.add(f"{at}.attn.attend", PagedAttention(i, shape.head_dim**-0.5, quantise=packed), turned, cache, tree)
        if not packed:
            attend = g.add(f"{at}.attn.merged", Reshape((-1, q)), attend)
        x = added(f"{at}.attn.residual", attend, matrix(f"{at}.attn.out", shape.hidden, q), x)
        h = norm(f"{at}.mlp_norm", x)
        gate_up = matrix(f"{at}.mlp.gate_up", 2 * shape.intermediate, shape.hidden)
        gated = g.add(f"{at}.mlp.gated", GatedQuantise() if packed else Gated(), h, gate_up)
        x = added(f"{at}.mlp.residual", gated, matrix(f"{at}.mlp.down", shape.hidden, shape.intermediate), x)
    h = norm("final_norm", g.add("out_hidden", GatherRows(), x, out_rows))
    head = embedding if shape.tied else matrix("lm_head", shape.vocab, shape.hidden, head_dtype)
    logits = g.add("lm_head", LinearQ() if packed else Linear(), h, head)
    return g.build(logits=logits, choices=g.add("choices", ArgMax(), logits), kv=cache)
