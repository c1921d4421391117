"""Model families and checkpoint sources, each with what it was proven by: `mlsdc models` prints them, tests/models runs every row.

A family needs no code of its own here or elsewhere: torch.export and the raising rules are generic. A row says that a model with these
traits was built small and at random, and that its numbers were compared with transformers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A tiny decoder: what a family's `config` is laid over. The vocabulary is the bytes.
BASE: Mapping[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip

PROOFS: Mapping[str, str] = {
    "logits": "captured and raised graphs give transformers' logits in f32, every one within 1e-4",
    "cache": "chunks through the paged cache give the full pass's logits, and a verified tree those of its paths",
    "text": "the int8 CPU artifact, speculating, continues prompts as transformers does in f32 (greedy, where its choices are clear)",
    "onnx": "the captured and the raised graph as ONNX files give the same numbers in onnxruntime, within 1e-4",
    "onnx-in": "an export by torch.onnx becomes the same row program, and continues a prompt greedily as transformers does",
    "gguf": "a GGUF file of the model, with the gguf package's own tensor names, gives transformers' logits within 1e-4",
    "exact": "every block dequantises as the gguf package does, bit for bit",
    "reads": "opens, reads every tensor exactly, and refuses what is missing, cut short or corrupt",
}


@dataclass(frozen=True)
class Family:
    """`config` is config.json's part that makes the trait, over BASE; `gguf` its architecture in GGUF files."""

    name: str
    model_type: str
    traits: str
    config: Mapping[str, Any] = field(default_factory=dict)
    proofs: tuple[str, ...] = ("logits", "cache", "text")
    gguf: str = ""

    @property
    def tiny(self) -> dict[str, Any]:
        """config.json of the random model."""
        return {**BASE, **self.config, "model_type": self.model_type}


@dataclass(frozen=True)
class Source:
    """A way to bring a checkpoint. `block` is the GGUF block format, if it is one."""

    name: str
    what: str
    proof: str
    block: str = ""


def _rope(kind: str, **facts: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **facts}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
_SHORT, _LONG = [1.0 + 0.05 * i for i in range(16)], [1.0 + 0.4 * i for i in range(16)]
_LONGROPE = _rope("longrope", short_factor=_SHORT, long_factor=_LONG, original_max_position_embeddings=64, factor=4.0)
_GEMMA: Mapping[str, Any] = {"head_dim": 32, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
_GRAPH = ("logits", "cache")
_TEXT = (*_GRAPH, "text")
_ALL = ("logits", "cache", "text", "gguf", "onnx", "onnx-in")
_FILE = ("logits", "cache", "gguf")

FAMILIES: tuple[Family, ...] = (
    Family("Llama 2", "llama", "grouped keys, SwiGLU", proofs=_ALL, gguf="llama"),
    Family("Llama 3", "llama", "llama3 RoPE scaling", {"rope_parameters": _LLAMA3}, (*_TEXT, "gguf"), "llama"),
    Family("SmolLM, SmolLM2", "llama", "tied embeddings, one kv head", {
        "tie_word_embeddings": True, "num_key_value_heads": 1}, (*_TEXT, "gguf"), "llama"),
    Family("TinyLlama", "llama", "biases everywhere", {"attention_bias": True, "mlp_bias": True}),
    Family("Llama, YaRN", "llama", "yarn RoPE scaling", {"rope_parameters": _YARN}, (*_TEXT, "gguf"), "llama"),
    Family("Llama, linear", "llama", "linear RoPE scaling", {"rope_parameters": _rope("linear", factor=4.0)}, (*_TEXT, "gguf"), "llama"),
    Family("Llama, dynamic", "llama", "dynamic NTK RoPE within its length", {"rope_parameters": _rope("dynamic", factor=4.0)}),
    Family("Mistral", "mistral", "sliding window", {"sliding_window": 20, "head_dim": 32}),
    Family("Qwen2, Qwen2.5", "qwen2", "biases on q, k and v", proofs=_ALL, gguf="qwen2"),
    Family("Qwen3", "qwen3", "QK-norm", {"head_dim": 32}, _ALL, "qwen3"),
    Family("SmolLM3", "smollm3", "layers without RoPE", {"no_rope_layers": [1, 0]}, _GRAPH),
    Family("OLMo 2", "olmo2", "norms behind attention and MLP, QK-norm over all heads", {}, _GRAPH),
    Family("Granite", "granite", "scaled embeddings, residuals and logits", {
        "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0, "attention_multiplier": 0.2}, _GRAPH),
    Family("Phi-3", "phi3", "fused QKV and gate-up", proofs=_ALL, gguf="phi3"),
    Family("Phi-3, long", "phi3", "longrope, the long factors", {
        "rope_parameters": _LONGROPE, "original_max_position_embeddings": 64}, (*_TEXT, "gguf"), "phi3"),
    Family("Phi-4-mini", "phi3", "the same, RoPE over part of a head", {
        "rope_parameters": _rope("default", partial_rotary_factor=0.75)}, (*_TEXT, "gguf"), "phi3"),
    Family("Mixtral", "mixtral", "2 of 4 experts a token", {
        "num_local_experts": 4, "sliding_window": None}, (*_TEXT, "gguf", "onnx"), "llama"),
    Family("Qwen3-MoE", "qwen3_moe", "3 of 8 experts, weights normalised, QK-norm", {
        "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True},
        (*_TEXT, "gguf"), "qwen3moe"),
    Family("OLMoE", "olmoe", "2 of 4 experts, weights as the softmax gives them", {
        "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}, _FILE, "olmoe"),
    Family("DBRX", "dbrx", "LayerNorm, fused and clipped QKV, 2 of 4 experts in three stacked matrices", {
        "d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 128, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}}),
    Family("OpenELM-like", "openelm", "heads and MLP widths that differ by layer (a module of the tests: transformers has none)"),
    Family("Gemma", "gemma", "scaled embeddings, norms of 1 + w", {"head_dim": 32, "tie_word_embeddings": True}, _FILE, "gemma"),
    Family("Gemma 2", "gemma2", "soft-capped scores and logits, four norms a layer, a window every other layer", {
        **_GEMMA, "sliding_window": 20, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
        _ALL, "gemma2"),
    Family("Gemma 3", "gemma3_text", "QK-norm, two RoPE bases, a window in most layers", {
        **_GEMMA, "sliding_window": 20, "query_pre_attn_scalar": 32, "num_hidden_layers": 6}, _ALL, "gemma3"),
)

_DECODED = "decoded to f32, then quantised as model.yaml says"
BLOCKS: Mapping[str, str] = {
    "Q4_0": "repacked as stored into q4 and q8", "Q4_1": "repacked as stored into q4; blocks keep their own grid in q8",
    "Q5_0": _DECODED, "Q5_1": _DECODED, "Q8_0": "repacked as stored into q8",
    "Q2_K": _DECODED, "Q3_K": _DECODED, "Q4_K": _DECODED, "Q5_K": _DECODED, "Q6_K": _DECODED,
    "F32": _DECODED, "F16": _DECODED, "BF16": _DECODED,
}  # fmt: skip

SOURCES: tuple[Source, ...] = (
    Source("Hugging Face folder", "config.json, safetensors (f32, f16, bf16; sharded or not), tokenizer.json, chat template", "reads"),
    Source("the same, quantised", "AWQ, GPTQ, FP8 and int4 of compressed-tensors, FP8 of transformers", "reads"),
    Source("GGUF file", "the same model, tokenizer and chat template from llama.cpp's metadata", "reads"),
    Source("ONNX file", "a decoder of opset 13 to 24, external data too, with config.json and tokenizer.json beside it", "reads"),
    *(Source(f"GGUF {kind}", what, "exact", kind) for kind, what in BLOCKS.items()),
)
