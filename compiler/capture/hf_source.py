"""A Hugging Face directory as a model source: config.json, safetensors (sharded or not), tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlsdc.compiler.capture.quantised_source import quantised_weights
from mlsdc.compiler.capture.safetensors_file import SafetensorsFile
from mlsdc.compiler.capture.source import Blocks, ModelSource, WeightSource
from mlsdc.compiler.errors import CaptureError

_INDEX = "model.safetensors.index.json"
# what families call the facts that a compile needs itself (DBRX, MPT, GPT-2)
OTHER_NAMES = {
    "hidden_size": ("d_model", "n_embd", "model_dim"),
    "num_hidden_layers": ("n_layers", "n_layer", "num_transformer_layers"),
    "max_position_embeddings": ("max_seq_len", "n_positions", "max_context_length"),
}


class HfWeights:
    """The directory's tensors, by name, over all shards."""

    def __init__(self, directory: Path) -> None:
        self._where = directory.name
        if (directory / _INDEX).exists():
            weight_map = _json(directory, _INDEX).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CaptureError(f"{self._where}/{_INDEX}: has no 'weight_map'")
            shards = sorted(set(weight_map.values()))
        else:
            shards = sorted(path.name for path in directory.glob("*.safetensors"))
        if not shards:
            raise CaptureError(f"{self._where}: has no *.safetensors file")
        self._files: dict[str, SafetensorsFile] = {}
        for shard in shards:
            file = SafetensorsFile(directory / shard)
            self._files |= dict.fromkeys(file.names(), file)

    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).shape(name)

    def read(self, name: str) -> NDArray[np.float32]:
        return self._file(name).read(name)

    def dtype(self, name: str) -> str:
        return self._file(name).dtype(name)

    def stored(self, name: str) -> NDArray[Any]:
        return self._file(name).stored(name)

    def block(self, name: str) -> Blocks | None:
        self._file(name)
        return None

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            raise CaptureError(f"{self._where}: has no tensor '{name}'")
        return self._files[name]


def hf_source(directory: Path, label: str) -> ModelSource:
    """Open a directory. Raises CaptureError for files that are missing, cut short or malformed."""
    weights = quantised_weights(_json(directory, "config.json"), HfWeights(directory), directory.name)
    return folder_source(directory, label, weights, {})


def folder_source(directory: Path, label: str, weights: WeightSource, facts: dict[str, Any], onnx: Path | None = None) -> ModelSource:
    """What a folder says of a model beside its tensors. `facts` stand in for a config.json that is not there."""
    config = _json(directory, "config.json", missing_ok=bool(facts)) or dict(facts)
    for key in ("quantization_config", "compression_config"):  # the tensors' business: the graph is of the model they stand for
        config.pop(key, None)
    config |= {key: config[name] for key, names in OTHER_NAMES.items() for name in names if name in config and key not in config}
    for key in ("model_type", "vocab_size", *OTHER_NAMES):
        if key not in config:
            raise CaptureError(f"{directory.name}/config.json: has no '{key}'")
    generation = _json(directory, "generation_config.json", missing_ok=True)
    tokenizer_config = _json(directory, "tokenizer_config.json", missing_ok=True)
    tokenizer = _text(directory, "tokenizer.json")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    return ModelSource(
        label=label,
        name=directory.name,
        license=str(config.get("license", "")),
        config=config,
        weights=weights,
        tokenizer_json=tokenizer,
        chat_template=_chat_template(directory, tokenizer_config.get("chat_template")),
        num_tokens=_num_tokens(tokenizer, directory),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        onnx=onnx,
    )


def _chat_template(directory: Path, in_config: Any) -> str:
    """A file of its own wins; of several named ones in tokenizer_config.json the one called `default`."""
    if (directory / "chat_template.jinja").exists():
        return _text(directory, "chat_template.jinja")
    if (directory / "chat_template.json").exists():
        in_config = _json(directory, "chat_template.json").get("chat_template")
    if isinstance(in_config, list):
        named = {entry.get("name"): entry.get("template") for entry in in_config if isinstance(entry, dict)}
        in_config = named.get("default")
    return in_config if isinstance(in_config, str) else ""


def _num_tokens(tokenizer: str, directory: Path) -> int:
    try:
        parsed = json.loads(tokenizer)
        vocab = parsed["model"]["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        return 1 + max(ids + [token["id"] for token in parsed.get("added_tokens", [])])
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"{directory.name}/tokenizer.json: not a tokenizer ({type(error).__name__}: {error})") from None


def _text(directory: Path, name: str) -> str:
    try:
        return (directory / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CaptureError(f"{directory.name}/{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _json(directory: Path, name: str, *, missing_ok: bool = False) -> dict[str, Any]:
    if missing_ok and not (directory / name).exists():
        return {}
    try:
        parsed = json.loads(_text(directory, name))
    except ValueError as error:
        raise CaptureError(f"{directory.name}/{name}: not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise CaptureError(f"{directory.name}/{name}: expected an object, found {type(parsed).__name__}")
    return parsed
