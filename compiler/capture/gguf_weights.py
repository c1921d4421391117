"""A GGUF file's tensors as a weight source: Hugging Face names and row order; stacked experts one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlsdc.compiler.capture.gguf_blocks import dequantise, finite_scales
from mlsdc.compiler.capture.gguf_file import GgufFile, GgufTensor
from mlsdc.compiler.capture.source import Blocks, checked, not_finite
from mlsdc.compiler.errors import CaptureError

PERMUTED = ("llama",)  # llama.cpp's converter interleaves the halves of q and k rows for these
NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3")  # and adds to norm weights the 1 that these models add themselves
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

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
    "ffn_gate_inp": "mlp.gate",
}
_OF_ARCHITECTURE = {  # where names differ from the ones above
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    **dict.fromkeys(("gemma2", "gemma3"), {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }),
}
# an expert's linears as checkpoints with every expert by itself call them: Mixtral's, which is a `llama` here, and all others'
_EXPERTS = {"llama": {"gate": "w1", "up": "w3", "down": "w2"}}
_EXPERT = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@dataclass(frozen=True)
class _Part:
    """`tensor`, or expert `expert` of a tensor [experts, n, k]."""

    tensor: GgufTensor
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    def of(self, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Its share of the tensor's bytes."""
        return raw if self.expert is None else raw.reshape(self.tensor.shape[0], -1)[self.expert]


def hf_name(name: str, architecture: str = "llama") -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; names without a counterpart stay.

    `blk.3.ffn_up.7.weight`, in files from before experts were stacked, is that of expert 7.
    """
    names = _NAMES | _OF_ARCHITECTURE.get(architecture, {})
    one = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight", name)
    if one is not None:
        return expert_name(one[1], one[2], int(one[3]), architecture)
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names:
        return name
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{names[part]}.{kind}" if layer is not None else f"{names[part]}.{kind}"


def expert_name(layer: str, part: str, expert: int, architecture: str) -> str:
    """`part` is gate, up or down."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERTS.get(architecture, _EXPERT)[part]}.weight"


def unpermuted(num_rows: int, heads: int) -> NDArray[np.intp]:
    """Order that takes llama.cpp's q or k rows back to Hugging Face's: per head, (2 i, 2 i + 1) -> (i, i + d/2)."""
    return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


class GgufWeights:
    """A GGUF file's tensors under Hugging Face names and in Hugging Face's row order."""

    def __init__(self, file: GgufFile, architecture: str, heads: Mapping[str, int], experts: int = 0) -> None:
        """`heads`: heads of the rows to put back in order, by projection (`q_proj`, `k_proj`). Raises CaptureError for other experts."""
        self._file = file
        self._heads = heads if architecture in PERMUTED else {}
        self._parts: dict[str, _Part] = {}
        for name, tensor in file.tensors.items():
            stacked = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight", name)
            if stacked is not None:
                if len(tensor.shape) != 3 or tensor.shape[0] != experts:
                    raise CaptureError(f"{file.where}: tensor '{name}' has shape {list(tensor.shape)}, expected that of {experts} experts")
                self._parts |= {expert_name(stacked[1], stacked[2], i, architecture): _Part(tensor, i) for i in range(experts)}
            elif name not in ROPE_FACTORS:
                self._parts[hf_name(name, architecture)] = _Part(tensor)
        self._norm_offset = np.float32(architecture in NORMS_PLUS_ONE)

    def names(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._part(name).shape

    def read(self, name: str) -> NDArray[np.float32]:
        part = self._part(name)
        values = dequantise(part.tensor.type, part.of(self._file.raw(part.tensor.name)), part.shape)
        if self._norm_offset and len(part.shape) == 1 and "norm" in name:
            values = values - self._norm_offset
        return checked(self._ordered(name, values), self._file.where, name)

    def block(self, name: str) -> Blocks | None:
        part = self._part(name)
        type_ = part.tensor.type
        if type_.block == 1:
            return None
        raw = part.of(self._file.raw(part.tensor.name))
        if not finite_scales(type_, raw):
            raise not_finite(self._file.where, name)
        rows = raw.reshape(-1, part.shape[-1] // type_.block * type_.num_bytes)
        return Blocks(type_.name, part.shape, self._ordered(name, rows))

    def _ordered(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        heads = self._heads.get(name.split(".")[-2])
        return rows if heads is None else rows[unpermuted(rows.shape[0], heads)]

    def _part(self, name: str) -> _Part:
        if name not in self._parts:
            raise CaptureError(f"{self._file.where}: has no tensor '{name}'")
        return self._parts[name]
