"""Heads of random weights for the tiny model of tests/laws, and artifacts that draft with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mlsdc.compiler.heads.checkpoint import write_own
from mlsdc.compiler.heads.config import EagleConfig, HeadConfig, MedusaConfig
from tests.laws.tiny import PADDED_VOCAB, TREE_NODES, config

HIDDEN, DRAFT = 96, 64
EAGLE = EagleConfig(HIDDEN, HIDDEN, PADDED_VOCAB, DRAFT, (2,), 6, 2, 16, 128, 1e-6, 10000.0)
EAGLE3 = EagleConfig(HIDDEN, HIDDEN, PADDED_VOCAB, DRAFT, (0, 1, 2), 6, 2, 16, 128, 1e-6, 10000.0, style="eagle3", own_head=True)
MEDUSA = MedusaConfig(HIDDEN, HIDDEN, PADDED_VOCAB, DRAFT, 3, 1e-6, (2,), known_next=True)


def write_heads(path: Path, head: HeadConfig, seed: int = 0, **changed: Any) -> Path:
    """A file of random heads; `changed` replaces tensors or `d2t`."""
    rng = np.random.default_rng(seed)
    tensors = {name: (1 + 0.1 * rng.standard_normal(shape) if len(shape) == 1 else rng.standard_normal(shape) / shape[1] ** 0.5)
               for name, shape in head.shapes().items()}
    d2t = changed.pop("d2t", np.arange(head.draft_vocab) * (256 // head.draft_vocab) + 1)
    write_own(path, head, {**tensors, **changed}, d2t, {"seed": str(seed)})
    return path


EXIT = MedusaConfig(HIDDEN, HIDDEN, PADDED_VOCAB, DRAFT, 1, 1e-6, (1,), first=1, own_norm=True, kind="exit")
SMALL_CONTEXT = 96


def write_small(folder: Path, **changed: Any) -> Path:
    """A smaller model with the tiny one's tokenizer, of a shorter context than the target's."""
    import torch
    import transformers

    from tests.laws.tiny import write_model

    write_model(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.manual_seed(1)
    llama = transformers.LlamaConfig(**{
        "vocab_size": PADDED_VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": SMALL_CONTEXT, "initializer_range": 0.15, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": 0, **changed})
    transformers.LlamaForCausalLM(llama).save_pretrained(folder)
    return folder


def with_heads(model: Path, *levels: dict[str, Any]) -> dict[str, Any]:
    """The tiny artifact's model.yaml with these levels, merged if there are several."""
    cascade: list[dict[str, Any]] = [*levels] if len(levels) < 2 else [{"merge": [*levels], "max_nodes": TREE_NODES}]
    return {**config(model), "cascade": cascade}
