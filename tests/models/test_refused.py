"""Families that cannot be captured say so in one line, with the nodes and the nearest rules."""

from __future__ import annotations

import dataclasses

import pytest

from mlsdc.compiler.capture.hf_module import hf_module
from mlsdc.compiler.capture.source import ModelSource
from mlsdc.compiler.capture.torch_export import ModuleWeights, capture_model
from mlsdc.compiler.errors import CaptureError
from mlsdc.compiler.families import BASE, Family


def source(family: Family) -> ModelSource:
    return ModelSource("tiny", "tiny", "", family.tiny, ModuleWeights(hf_module(family.tiny)), "", "", 256, None, ())


@pytest.mark.parametrize(("family", "message"), [
    (Family("Cohere", "cohere", ""), r"^cannot capture stack \(stack\.default in model\.layers\.0\.self_attn; the nearest rule is "),
    (Family("GPT-2", "gpt2", ""), r"^cannot capture addmm \(addmm\.default in transformer\.h\.0\.attn\.c_attn; the nearest rule is "),
])  # fmt: skip
def test_what_cannot_be_captured_is_one_line(family: Family, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as error:
        capture_model(source(family))
    assert "\n" not in str(error.value)


def test_dynamic_rope_beyond_the_models_length_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    with pytest.raises(CaptureError, match=r"^model\.rotary_emb: dynamic RoPE changes its frequencies beyond 256 tokens, 300 are asked"):
        capture_model(source(Family("Llama", "llama", "", {"rope_parameters": rope})), max_tokens=300)


def test_rope_factors_of_another_model_are_refused() -> None:
    import numpy as np

    mine = dataclasses.replace(source(Family("Llama", "llama", "")), rope_factors=np.ones(5, np.float32))
    with pytest.raises(CaptureError, match="^tiny: 5 RoPE factors, the model has 16 frequencies$"):
        capture_model(mine)


def test_the_tiny_decoder_has_heads_the_cpu_attends_with() -> None:
    assert BASE["hidden_size"] // BASE["num_attention_heads"] % 16 == 0
