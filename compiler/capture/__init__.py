"""Getting a model in: weight sources (GGUF, Hugging Face directory, package) and graphs (torch.export).

`load_source` needs numpy only; `torch_export` imports torch and transformers and is imported by who captures.
"""

from __future__ import annotations

from mlsdc.compiler.capture.resolve import load_source
from mlsdc.compiler.capture.source import Blocks, ModelSource, WeightSource

__all__ = ["Blocks", "ModelSource", "WeightSource", "load_source"]
