"""Heads of other trainers, read in place under our names.

Medusa's original layout: `config.json` (medusa_num_heads, medusa_num_layers) and `medusa_lm_head.pt` or `.safetensors`, whose tensors are
`I.J.linear.weight`, `.bias` (blocks) and `I.N.weight` (the head), with or without `medusa_head.` in front.

EAGLE-3: SpecForge's and the paper's (`LlamaForCausalLMEagle3`: `midlayer.*`) and speculators' (`speculators_model_type: eagle3`:
`layers.0.*`, `norm_before_residual`). `d2t` holds differences there: draft id i is the target's id i + d2t[i]. Layers to read are counted
by outputs in SpecForge (`eagle_config`: 1 is layer 1's output) and by layers passed in speculators; without either: 2, n/2 and n - 3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.capture import ModelSource
from mlsdc.compiler.capture.safetensors_file import SafetensorsFile
from mlsdc.compiler.capture.source import checked
from mlsdc.compiler.errors import HeadError
from mlsdc.compiler.heads.checkpoint import HeadFile, check_d2t
from mlsdc.compiler.heads.config import EagleConfig, HeadConfig, MedusaConfig
from mlsdc.runtime.safetensors import SafetensorsFile as RawFile

Array = npt.NDArray[Any]
EAGLE3 = {
    "hidden_norm": "LAYER.hidden_norm.weight", "embed_norm": "LAYER.input_layernorm.weight", "fc": "fc.weight",
    "q": "LAYER.self_attn.q_proj.weight", "k": "LAYER.self_attn.k_proj.weight", "v": "LAYER.self_attn.v_proj.weight",
    "o": "LAYER.self_attn.o_proj.weight", "mlp_norm": "LAYER.post_attention_layernorm.weight", "gate": "LAYER.mlp.gate_proj.weight",
    "up": "LAYER.mlp.up_proj.weight", "down": "LAYER.mlp.down_proj.weight", "norm": "norm.weight", "lm_head": "lm_head.weight",
    "embed": "embed_tokens.weight",
}
FILES = ("model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt")


def read_foreign(path: Path, kind: str, source: ModelSource) -> HeadFile:
    """`path` is the checkpoint's folder. Raises HeadError, naming the file and all tensors that are missing or that nothing reads."""
    config = read_config(path)
    tensors = _tensors(path)
    read = _read_medusa if kind == "medusa" else _read_eagle3
    return read(path, config, tensors, source)


def _read_medusa(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Array], source: ModelSource) -> HeadFile:
    heads, layers = _number(path, config, "medusa_num_heads"), _number(path, config, "medusa_num_layers")
    tensors = {name.removeprefix("medusa_head."): value for name, value in tensors.items()}
    names = {f"heads.{i}.lm_head": f"{i}.{layers}.weight" for i in range(heads)}
    for i in range(heads):
        for j in range(layers):
            names |= {f"heads.{i}.{j}": f"{i}.{j}.linear.weight", f"heads.{i}.{j}.bias": f"{i}.{j}.linear.bias"}
    hidden, vocab = int(source.config["hidden_size"]), int(source.config["vocab_size"])
    first = tensors.get(names["heads.0.lm_head"])
    made = MedusaConfig(
        hidden, hidden if first is None else first.shape[1], vocab if first is None else first.shape[0],
        vocab if first is None else first.shape[0], heads, float(source.config.get("rms_norm_eps", 1e-6)),
        (int(source.config["num_hidden_layers"]),), num_layers=layers, bias=True, own_head=True)
    return _file(path, made, names, tensors, np.arange(made.draft_vocab, dtype=np.int32), ())


def _read_eagle3(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Array], source: ModelSource) -> HeadFile:
    speculators = config.get("speculators_model_type") == "eagle3"
    if not speculators and "LlamaForCausalLMEagle3" not in config.get("architectures", ()):
        found = config.get("speculators_model_type") or ", ".join(config.get("architectures", ())) or "nothing"
        raise HeadError(f"{path.name}/config.json: says {found}; EAGLE-3 heads say LlamaForCausalLMEagle3 or speculators_model_type "
                        "eagle3")
    layer = config.get("transformer_layer_config", {}) if speculators else config
    names = {name: theirs.replace("LAYER", "layers.0" if speculators else "midlayer") for name, theirs in EAGLE3.items()}
    hidden, heads = _number(path, layer, "hidden_size"), _number(path, layer, "num_attention_heads")
    target_hidden = int(config.get("target_hidden_size") or source.config["hidden_size"])
    count = int(source.config["num_hidden_layers"])
    vocab = int(layer.get("vocab_size") or source.config["vocab_size"])
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    scaled = rope.get("rope_type", rope.get("type", "default"))
    if scaled not in ("default", None):
        raise HeadError(f"{path.name}/config.json: RoPE of type '{scaled}'; heads with plain RoPE are read")
    made = EagleConfig(
        hidden, target_hidden, vocab, int(config.get("draft_vocab_size") or vocab), aux_layers(config, speculators, count), heads,
        int(layer.get("num_key_value_heads") or heads), int(layer.get("head_dim") or hidden // heads),
        _number(path, layer, "intermediate_size"), float(layer.get("rms_norm_eps", 1e-6)),
        float(layer.get("rope_theta") or rope.get("rope_theta") or 10000.0), style="eagle3",
        norm_before_residual=bool(config.get("norm_before_residual", False)), own_head=names["lm_head"] in tensors,
        own_embed=names["embed"] in tensors, act=str(layer.get("hidden_act", "silu")))
    d2t = np.arange(made.draft_vocab, dtype=np.int64)
    if "d2t" in tensors:
        if tensors["d2t"].shape != d2t.shape:
            raise HeadError(f"{path.name}: d2t has {tensors['d2t'].size} entries, draft_vocab_size is {made.draft_vocab}")
        d2t = d2t + tensors["d2t"].astype(np.int64)
    elif made.draft_vocab != made.vocab_size:
        raise HeadError(f"{path.name}: has no tensor 'd2t', which a draft vocabulary of {made.draft_vocab} of {made.vocab_size} needs")
    return _file(path, made, names, tensors, d2t, ("d2t", "t2d"))


def aux_layers(config: Mapping[str, Any], speculators: bool, layers: int) -> tuple[int, ...]:
    """Layers passed."""
    if speculators:
        listed = config.get("eagle_aux_hidden_state_layer_ids")
        taps = [int(i) for i in listed] if listed else []
    else:
        listed = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        taps = [int(i) + 1 for i in listed] if listed else []
    return tuple(taps) or (2, layers // 2, layers - 3)


def _file(path: Path, config: HeadConfig, names: Mapping[str, str], tensors: Mapping[str, Array], d2t: Array, beside: tuple[str, ...]
          ) -> HeadFile:
    """Tensors under our names; errors speak of theirs."""
    wanted = {name: names[name] for name in config.shapes()}
    missing = [theirs for theirs in wanted.values() if theirs not in tensors]
    extra = [name for name in tensors if name not in wanted.values() and name not in beside]
    for what, listed in (("has no tensor", missing), ("has a tensor that nothing reads:", extra)):
        if listed:
            more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
            raise HeadError(f"{path.name}: {what} {', '.join(map(repr, listed[:8]))}{more}")
    for name, shape in config.shapes().items():
        if tensors[wanted[name]].shape != shape:
            raise HeadError(f"{path.name}: tensor '{wanted[name]}' has shape {list(tensors[wanted[name]].shape)}, config.json and the "
                            f"model say {list(shape)}")
    ours = {name: checked(np.asarray(tensors[theirs], np.float32), path.name, theirs) for name, theirs in wanted.items()}
    return HeadFile(path.name, config, ours, check_d2t(path.name, d2t.astype(np.int64), config).astype(np.int32))


def read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise HeadError(f"{path.name}: neither a file of `mlsdc train --level heads` nor a folder with config.json and weights")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HeadError(f"{path.name}/config.json: cannot be read ({getattr(error, 'strerror', None) or 'not JSON'})") from None
    if not isinstance(config, dict):
        raise HeadError(f"{path.name}/config.json: expected an object, found {type(config).__name__}")
    return config


def _tensors(path: Path) -> dict[str, Array]:
    found = next((path / name for name in FILES if (path / name).is_file()), None)
    if found is None:
        raise HeadError(f"{path.name}: has no weights; one of {', '.join(FILES)} is expected")
    if found.suffix == ".safetensors":
        floats, raw = SafetensorsFile(found), RawFile(found)
        whole = {name for name, info in raw.tensors.items() if info.dtype in ("I64", "I32", "BOOL", "U8", "I8")}
        return {name: np.array(raw.tensor(name)) if name in whole else floats.read(name) for name in floats.names()}
    import torch

    try:
        state = torch.load(found, map_location="cpu", weights_only=True)
        return {name: (value.float() if value.is_floating_point() else value).numpy() for name, value in state.items()}
    except Exception as error:  # whatever torch says of a file that is no state dict
        first = (str(error).strip().splitlines() or [""])[0]
        raise HeadError(f"{path.name}/{found.name}: cannot be read ({type(error).__name__}: {first})") from None


def _number(path: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise HeadError(f"{path.name}/config.json: {key} is {value!r}, expected a whole number of at least 1")
    return value
