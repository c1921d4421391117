"""The Hugging Face module of a config, built without weights, with a RoPE of one set of frequencies: what torch.export is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mlsdc.compiler.capture.on_meta import EmptyOnMeta
from mlsdc.compiler.errors import CaptureError


def hf_module(config: Mapping[str, Any], attention: str = "sdpa") -> nn.Module:
    """The Hugging Face module of a config, without weights: parameters on the meta device, f32; buffers that it computes have their values.

    A model with soft-capped scores is built with `eager` attention: torch's fused op has no soft-cap.
    """
    import transformers

    ours = ("model_type", "quantization_config", "torch_dtype", "dtype", "use_cache")
    facts = {key: value for key, value in config.items() if key not in ours}
    if facts.get("attn_logit_softcapping"):
        attention = "eager"
    try:
        hf_config = transformers.AutoConfig.for_model(config["model_type"], **facts)
        hf_config.use_cache = False
        with EmptyOnMeta():
            module = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation=attention, dtype=torch.float32)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise CaptureError(f"transformers cannot build a '{config['model_type']}' model: {first_line(error)}") from None
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            part.register_parameter(name, nn.Parameter(parameter.to("meta"), requires_grad=False))
    module.tie_weights()
    return module.eval()  # type: ignore[no-any-return]


def settle_rope(module: nn.Module, max_tokens: int) -> None:
    """Let frequencies that depend on the sequence's length be those of one length, in place: a cache holds keys turned once.

    `longrope` has two sets: the long one where sequences may be longer than the original context, else the short one (vLLM's rule).
    `dynamic` leaves the frequencies alone up to the model's context length. Raises CaptureError for a length beyond that.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for path, part in module.named_modules():
        kind = getattr(part, "rope_type", None)
        if kind == "longrope":
            original = int(part.config.rope_parameters["original_max_position_embeddings"])
            if max_tokens > original:
                part.inv_freq = nn.Buffer(ROPE_INIT_FUNCTIONS[kind](part.config, "cpu", seq_len=original + 1)[0], persistent=False)
        elif kind == "dynamic":
            original = int(part.original_max_seq_len)
            if max_tokens > original:
                raise CaptureError(f"{path}: dynamic RoPE changes its frequencies beyond {original} tokens, {max_tokens} are asked for")
        else:
            continue
        part.rope_type = "default"


def divide_frequencies(module: nn.Module, factors: NDArray[np.float32], label: str) -> None:
    """Divide every RoPE frequency of the module, in place. Raises CaptureError for another number of factors."""
    for part in module.modules():
        inv_freq = getattr(part, "inv_freq", None)
        if isinstance(inv_freq, torch.Tensor):
            if inv_freq.shape != factors.shape:
                raise CaptureError(f"{label}: {factors.size} RoPE factors, the model has {inv_freq.numel()} frequencies")
            part.inv_freq = nn.Buffer(inv_freq / torch.from_numpy(factors), persistent=False)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
