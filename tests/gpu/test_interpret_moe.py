"""A mixture of experts through the GPU program: device `interpret` says what the CPU says, of prompts whose pairs are sorted by expert."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.compiler.ops_moe import pairs_alone
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.sampling_params import SamplingParams
from tests.gpu.tiny import PADDED_VOCAB, config, write_model

EXPERTS, SLOTS = 5, 2
PROMPT = list(b"a prompt of some tokens")


def write_mixtral(folder: Path) -> None:
    """The tiny model's tokenizer with two layers of five experts, of which a row takes two."""
    import torch
    import transformers

    write_model(folder)
    torch.manual_seed(0)
    mixtral = transformers.MixtralConfig(
        vocab_size=PADDED_VOCAB, hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        head_dim=32, max_position_embeddings=512, num_local_experts=EXPERTS, num_experts_per_tok=SLOTS, initializer_range=0.15,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=0)
    transformers.MixtralForCausalLM(mixtral).save_pretrained(folder)


def said(path: Path, device: str) -> list[int]:
    with Engine.load(path, device=device, num_pages=30) as engine:
        (result,) = engine.generate([PROMPT], SamplingParams(max_tokens=3, ignore_eos=True))
        return list(result.token_ids)


def test_texts_of_a_mixture_of_experts_are_the_cpus(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    from mlsdc.compiler import compile_model

    (tmp_path / "model").mkdir()
    write_mixtral(tmp_path / "model")
    compile_model(config(tmp_path / "model", "h100,cpu"), tmp_path / "moe.mlsdc")
    assert len(PROMPT) > pairs_alone(EXPERTS, SLOTS)
    kernels = [key for target in Artifact.open(tmp_path / "moe.mlsdc").manifest.targets for key in target.kernels]
    assert any(key.startswith("expert_tiles_q") for key in kernels)
    assert said(tmp_path / "moe.mlsdc", "interpret") == said(tmp_path / "moe.mlsdc", "cpu")
