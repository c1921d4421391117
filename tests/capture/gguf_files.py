"""A tiny Llama as a GGUF file, written with llama.cpp's own package: the reader under test has no part in it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

TOKENS = ["<|end|>", *"abcdefgh", "ab", "cd", "Ġ", "1", "2"]
HIDDEN, HEADS, KV_HEADS, MLP = 64, 4, 2, 96
Q = gguf.GGMLQuantizationType


def shapes() -> dict[str, tuple[int, ...]]:
    head_dim = HIDDEN // HEADS
    return {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * head_dim, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * head_dim, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (MLP, HIDDEN),
        "blk.0.ffn_up.weight": (MLP, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, MLP),
        "output_norm.weight": (HIDDEN,),
    }


def values() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes().items()}


def write(path: Path, *, quantise: gguf.GGMLQuantizationType = Q.Q4_1, architecture: str = "llama", pre: str = "smollm") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_block_count(1)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(0)
    for name, tensor in values().items():
        kind = quantise if tensor.ndim == 2 else Q.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind) if kind != Q.F32 else tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
