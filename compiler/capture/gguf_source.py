"""A GGUF file as a model source: config and facts from its metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlsdc.compiler.capture.gguf_blocks import dequantise
from mlsdc.compiler.capture.gguf_file import GgufFile
from mlsdc.compiler.capture.gguf_tokenizer import tokenizer_json
from mlsdc.compiler.capture.gguf_weights import GgufWeights
from mlsdc.compiler.capture.source import ModelSource, checked
from mlsdc.compiler.errors import CaptureError

MODEL_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text",
    "qwen3moe": "qwen3_moe", "olmoe": "olmoe",
}  # fmt: skip  # architecture -> config.json's model_type
_PARTIAL = ("phi3",)  # models that know of RoPE over a part of a head
WITH_EXPERTS = {"llama": "mixtral"}  # of a file that has experts, where it is another one

_CONFIG = {  # metadata key after the architecture -> config.json key
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}


@dataclass(frozen=True)
class _Metadata:
    """Typed access to metadata, with the file and key in every error."""

    file: GgufFile
    architecture: str

    def get(self, key: str) -> Any:
        full = f"{self.architecture}.{key}"
        if full not in self.file.metadata:
            raise CaptureError(f"{self.file.where}: metadata has no '{full}'")
        value = self.file.metadata[full]
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CaptureError(f"{self.file.where}: '{full}' differs by layer, which cannot be captured")
            value = value[0]
        return value

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata


def config_from(file: GgufFile) -> dict[str, Any]:
    """config.json's facts from the metadata. Raises CaptureError naming the key that is missing or not understood."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise CaptureError(f"{file.where}: architecture '{architecture}' cannot be captured from GGUF; known are {known}")
    metadata = _Metadata(file, architecture)
    config: dict[str, Any] = {"model_type": MODEL_TYPES[architecture]} | {key: metadata.get(gguf) for gguf, key in _CONFIG.items()}
    config["rms_norm_eps"] = shortest(config["rms_norm_eps"])
    even = config["hidden_size"] // config["num_attention_heads"]
    head_dim = metadata.get("attention.key_length") if metadata.has("attention.key_length") else even
    config["head_dim"] = head_dim
    turned = metadata.get("rope.dimension_count") if metadata.has("rope.dimension_count") else head_dim
    if turned != head_dim and architecture not in _PARTIAL:
        raise CaptureError(f"{file.where}: '{architecture}.rope.dimension_count' is {turned}, expected the head_dim {head_dim}")
    if "token_embd.weight" not in file.tensors:
        raise CaptureError(f"{file.where}: has no tensor 'token_embd.weight'")
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["hidden_act"] = "silu"
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    config["pad_token_id"] = None
    config["rope_parameters"] = rope_from(file, metadata)
    if turned != head_dim:
        config["rope_parameters"]["partial_rotary_factor"] = turned / head_dim
    if metadata.has("attention.sliding_window") and architecture != "qwen2":
        config["sliding_window"] = metadata.get("attention.sliding_window") or None
    if num_experts(metadata):
        config |= {"model_type": WITH_EXPERTS.get(architecture, config["model_type"])}
    more = _FACTS.get(config["model_type"])
    return config | more(metadata, config) if more else config


def rope_from(file: GgufFile, metadata: _Metadata) -> dict[str, Any]:
    """config.json's `rope_parameters`. Raises CaptureError for a kind of scaling that is not known."""
    theta = shortest(metadata.get("rope.freq_base")) if metadata.has("rope.freq_base") else 10000.0
    kind = metadata.get("rope.scaling.type") if metadata.has("rope.scaling.type") else "none"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": shortest(metadata.get("rope.scaling.factor"))}
    elif kind not in ("none", "longrope"):
        raise CaptureError(f"{file.where}: '{metadata.architecture}.rope.scaling.type' is '{kind}'; known are none, linear, yarn, longrope")
    if metadata.has("rope.scaling.original_context_length"):
        rope["original_max_position_embeddings"] = metadata.get("rope.scaling.original_context_length")
    factors = {key: rope_factors(file, f"rope_factors_{key}.weight") for key in ("short", "long")}
    if factors["short"] is not None and factors["long"] is not None:
        rope |= {"rope_type": "longrope", "short_factor": factors["short"].tolist(), "long_factor": factors["long"].tolist()}
        if metadata.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = shortest(metadata.get("rope.scaling.attn_factor"))
    elif kind == "longrope":
        raise CaptureError(f"{file.where}: '{metadata.architecture}.rope.scaling.type' is 'longrope', but there are no RoPE factors")
    return rope


def rope_factors(file: GgufFile, name: str) -> NDArray[np.float32] | None:
    """What each frequency is divided by, if the file has that tensor."""
    if name not in file.tensors:
        return None
    tensor = file.tensors[name]
    return checked(dequantise(tensor.type, file.raw(name), tensor.shape), file.where, name)


def shortest(value: float) -> float:
    """A number that the file holds as f32 as the shortest decimal that means it (1e-05): what the model was trained with."""
    return float(np.format_float_positional(np.float32(value), unique=True))


def _phi3(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(config["rope_parameters"])
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    return {"original_max_position_embeddings": original}


def num_experts(metadata: _Metadata) -> int:
    return int(metadata.get("expert_count")) if metadata.has("expert_count") else 0


def _mixtral(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    window = config.get("sliding_window")
    return {"num_local_experts": num_experts(metadata), "num_experts_per_tok": metadata.get("expert_used_count"), "sliding_window": window}


def _many_experts(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Whether weights of the chosen experts are made to sum to 1 is not in most files: Qwen3's are, OLMoE's are not, says llama.cpp."""
    normed = metadata.get("expert_weights_norm") if metadata.has("expert_weights_norm") else metadata.architecture == "qwen3moe"
    width = metadata.get("expert_feed_forward_length") if metadata.has("expert_feed_forward_length") else config["intermediate_size"]
    return {"num_experts": metadata.get("expert_count"), "num_experts_per_tok": metadata.get("expert_used_count"),
            "moe_intermediate_size": width, "norm_topk_prob": bool(normed)}


def _gemma(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    gelu = "gelu_pytorch_tanh"
    return {"hidden_act": gelu, "hidden_activation": gelu, "query_pre_attn_scalar": _query_scale(metadata, config)}


def _query_scale(metadata: _Metadata, config: Mapping[str, Any]) -> int:
    """The file does not say by what queries are divided; llama.cpp tells the 27B models apart by their number of layers."""
    even = int(config["hidden_size"]) // int(config["num_attention_heads"])
    largest = (metadata.architecture, config["num_hidden_layers"]) in (("gemma2", 46), ("gemma3", 62))
    return even if largest else int(config["head_dim"])


def _gemma2(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return _gemma(metadata, config) | {key: shortest(metadata.get(key)) if metadata.has(key) else value for key, value in caps.items()}


def _gemma3(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Every sixth layer sees everything, the others a window, with RoPE bases of their own."""
    layers = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(int(config["num_hidden_layers"]))]
    local = shortest(metadata.get("rope.freq_base_swa")) if metadata.has("rope.freq_base_swa") else 10000.0
    near = {"rope_type": "default", "rope_theta": local}
    rope = dict(config["rope_parameters"])
    if not metadata.has("rope.freq_base"):
        rope["rope_theta"] = 1e6
    return _gemma(metadata, config) | {"layer_types": layers, "rope_parameters": {"full_attention": rope, "sliding_attention": near}}


_FACTS: dict[str, Callable[[_Metadata, Mapping[str, Any]], dict[str, Any]]] = {
    "phi3": _phi3, "gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3,
    "mixtral": _mixtral, "qwen3_moe": _many_experts, "olmoe": _many_experts,
}  # fmt: skip  # by model_type


def gguf_source(path: Path, label: str) -> ModelSource:
    """Open a GGUF file. Raises CaptureError for one that is cut short, malformed, or of an unknown architecture or tokenizer."""
    file = GgufFile(path)
    try:
        return _source(file, path, label)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise CaptureError(f"{file.where}: metadata is malformed ({type(error).__name__}: {error})") from None


def _source(file: GgufFile, path: Path, label: str) -> ModelSource:
    config = config_from(file)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    metadata, architecture = file.metadata, str(file.metadata["general.architecture"])
    eos = [metadata[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in metadata]
    config["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = eos
    return ModelSource(
        label=label,
        name=str(metadata.get("general.name") or path.stem),
        license=str(metadata.get("general.license", "")),
        config=config,
        weights=GgufWeights(file, architecture, heads, int(config.get("num_experts") or config.get("num_local_experts") or 0)),
        rope_factors=rope_factors(file, "rope_freqs.weight"),
        tokenizer_json=tokenizer_json(file),
        chat_template=str(metadata.get("tokenizer.chat_template", "")),
        num_tokens=len(metadata["tokenizer.ggml.tokens"]),
        bos_token_id=config["bos_token_id"],
        eos_token_ids=tuple(dict.fromkeys(eos)),
        tokens=tuple(metadata["tokenizer.ggml.tokens"]),
    )
