"""An ONNX model as a model source: the file, and beside it what exporters leave there: config.json, tokenizer.json, chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlsdc.compiler.capture.hf_source import OTHER_NAMES, folder_source
from mlsdc.compiler.capture.source import ModelSource, WithConstants
from mlsdc.compiler.errors import CaptureError


def onnx_model(directory: Path) -> Path | None:
    """The one model of a folder without safetensors: model.onnx, or the only .onnx file there or in `onnx/`."""
    if any(directory.glob("*.safetensors")):
        return None
    for folder in (directory, directory / "onnx"):
        if (folder / "model.onnx").is_file():
            return folder / "model.onnx"
        found = sorted(folder.glob("*.onnx"))
        if len(found) > 1:
            raise CaptureError(f"{directory.name}: holds {', '.join(path.name for path in found)}; name one of them")
        if found:
            return found[0]
    return None


def onnx_source(path: Path, label: str) -> ModelSource:
    """Open a model. Raises CaptureError for files that are missing, cut short or malformed."""
    from mlsdc.compiler.capture.onnx_file import OnnxFile

    file = OnnxFile.open(path)
    folder = path.parent if (path.parent / "config.json").exists() or path.parent.name != "onnx" else path.parent.parent
    return folder_source(folder, label, file, facts_of(file), path)


def facts_of(file: Any) -> dict[str, Any]:
    """What a compile needs to know where there is no config.json: sizes as the graph shows them."""
    outputs = {value.name: value for value in file.model.graph.output}
    logits = outputs.get("logits", file.model.graph.output[0]).type.tensor_type.shape.dim
    past = [value for value in file.model.graph.input if "past" in value.name or "cache" in value.name]
    facts: dict[str, Any] = {"model_type": "onnx", "num_hidden_layers": max(1, len(past) // 2), "max_position_embeddings": 2048}
    if len(logits):
        facts["vocab_size"] = logits[-1].dim_value
    tables = [shape for name in file.initializers if len(shape := file.shape(name)) == 2 and shape[0] == facts.get("vocab_size")]
    if tables:
        facts["hidden_size"] = tables[0][1]
    missing = [key for key in ("vocab_size", *OTHER_NAMES) if not facts.get(key)]
    return {} if missing else facts


def capture_onnx(source: ModelSource, max_tokens: int, name: str) -> tuple[Any, WithConstants]:
    """The graph of an ONNX source and its weights. Raises CaptureError."""
    from mlsdc.compiler.capture.onnx_graph import OnnxGraph

    file: Any = source.weights
    made = OnnxGraph(file, max_tokens, name)
    return made.run(), WithConstants(file, made.constants, made.turned)
