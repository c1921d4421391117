"""A GGUF file as a model source: Hugging Face names and row order, config and facts from its metadata."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlsdc.compiler.capture.gguf_blocks import dequantise, finite_scales
from mlsdc.compiler.capture.gguf_file import GgufFile, GgufTensor
from mlsdc.compiler.capture.gguf_tokenizer import tokenizer_json
from mlsdc.compiler.capture.source import Blocks, ModelSource, checked, not_finite
from mlsdc.compiler.errors import CaptureError

MODEL_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text",
}  # fmt: skip  # architecture -> config.json's model_type
_PERMUTED = ("llama",)  # llama.cpp's converter interleaves the halves of q and k rows for these
_NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3")  # and adds to norm weights the 1 that these models add themselves

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_CONFIG = {  # metadata key after the architecture -> config.json key
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}


_OF_ARCHITECTURE = {  # where names differ from the ones above
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    **dict.fromkeys(("gemma2", "gemma3"), {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }),
}


def hf_name(name: str, architecture: str = "llama") -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; names without a counterpart stay."""
    names = _NAMES | _OF_ARCHITECTURE.get(architecture, {})
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names:
        return name
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{names[part]}.{kind}" if layer is not None else f"{names[part]}.{kind}"


def unpermuted(num_rows: int, heads: int) -> NDArray[np.intp]:
    """Order that takes llama.cpp's q or k rows back to Hugging Face's: per head, (2 i, 2 i + 1) -> (i, i + d/2)."""
    return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


class GgufWeights:
    """A GGUF file's tensors under Hugging Face names and in Hugging Face's row order."""

    def __init__(self, file: GgufFile, architecture: str, heads: Mapping[str, int]) -> None:
        """`heads`: heads of the rows to put back in order, by projection (`q_proj`, `k_proj`)."""
        self._file = file
        self._heads = heads
        self._tensors = {hf_name(name, architecture): tensor for name, tensor in file.tensors.items() if name not in _ROPE_FACTORS}
        self._norm_offset = np.float32(architecture in _NORMS_PLUS_ONE)

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str) -> NDArray[np.float32]:
        tensor = self._tensor(name)
        values = dequantise(tensor.type, self._file.raw(tensor.name), tensor.shape)
        if self._norm_offset and len(tensor.shape) == 1 and "norm" in name:
            values = values - self._norm_offset
        return checked(self._ordered(name, values), self._file.where, name)

    def block(self, name: str) -> Blocks | None:
        tensor = self._tensor(name)
        if tensor.type.block == 1:
            return None
        raw = self._file.raw(tensor.name)
        if not finite_scales(tensor.type, raw):
            raise not_finite(self._file.where, name)
        rows = raw.reshape(-1, tensor.shape[-1] // tensor.type.block * tensor.type.num_bytes)
        return Blocks(tensor.type.name, tensor.shape, self._ordered(name, rows))

    def _ordered(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        heads = self._heads.get(name.split(".")[-2])
        return rows if heads is None else rows[unpermuted(rows.shape[0], heads)]

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise CaptureError(f"{self._file.where}: has no tensor '{name}'")
        return self._tensors[name]


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


_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


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
    if turned != head_dim:
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
    if metadata.has("attention.sliding_window") and architecture != "qwen2":
        config["sliding_window"] = metadata.get("attention.sliding_window") or None
    more = _FACTS.get(architecture)
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
    "phi3": _phi3, "gemma": _gemma, "gemma2": _gemma2, "gemma3": _gemma3,
}  # fmt: skip


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
        weights=GgufWeights(file, architecture, heads if architecture in _PERMUTED else {}),
        rope_factors=rope_factors(file, "rope_freqs.weight"),
        tokenizer_json=tokenizer_json(file),
        chat_template=str(metadata.get("tokenizer.chat_template", "")),
        num_tokens=len(metadata["tokenizer.ggml.tokens"]),
        bos_token_id=config["bos_token_id"],
        eos_token_ids=tuple(dict.fromkeys(eos)),
        tokens=tuple(metadata["tokenizer.ggml.tokens"]),
    )
