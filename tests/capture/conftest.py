"""transformers' reading of the real model, made once: it is the slow half of every comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def smollm2_hf(smollm2_gguf: Path) -> Any:
    """SmolLM2 as transformers loads it from the same GGUF, f32."""
    import torch
    import transformers

    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32)
