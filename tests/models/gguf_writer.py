"""A tiny transformers model as a GGUF file, by the gguf package's own table of names: the reader under test has no part in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import nn

PERMUTED = ("llama",)
GEMMAS = ("gemma", "gemma2", "gemma3")


def write_gguf(path: Path, model: nn.Module, architecture: str, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> Path:
    """What convert_hf_to_gguf.py writes for the architecture, matrices in `kind`, with a vocabulary of bytes."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    _rope(writer, config, head_dim)
    if experts := getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if architecture == "qwen3moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    _vocabulary(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == architecture), config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, parameter in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = parameter.float().numpy()
        if architecture in PERMUTED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture in GEMMAS and name.endswith("norm.weight"):
            values = values + np.float32(1)
        for part, of_part in split_experts(name, values).items():
            stored = names.get_name(part, (".weight", ".bias"))
            assert stored, part
            as_kind = kind if of_part.ndim > 1 and "ffn_gate_inp" not in stored else gguf.GGMLQuantizationType.F32
            writer.add_tensor(stored, gguf.quants.quantize(np.ascontiguousarray(of_part), as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split_experts(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """transformers 5 keeps gate and up of all experts in one tensor; GGUF files have one tensor for each."""
    path, _, last = name.rpartition(".")
    if not path.endswith(".experts"):
        return {name: values}
    if last == "down_proj":
        return {f"{path}.down_proj.weight": values}
    gate, up = np.split(values, 2, axis=1)
    return {f"{path}.gate_proj.weight": gate, f"{path}.up_proj.weight": up}


def _rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope and rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        for key in ("short", "long"):
            writer.add_tensor(f"rope_factors_{key}.weight", np.array(rope[f"{key}_factor"], np.float32))
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim))


def _llama3_factors(rope: Any, dim: int) -> np.ndarray:
    """convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors."""
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for freq in 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim):
        wavelen = 2 * np.pi / freq
        if wavelen < original / high:
            factors.append(1.0)
        elif wavelen > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelen - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*sorted(ByteLevel.alphabet())[: size - 1], "ab"])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["a b"])
