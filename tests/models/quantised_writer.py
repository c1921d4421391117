"""A family's tiny model as others quantise and store it: packed here word by word from the layouts' descriptions, by code of its own.

What a linear means is computed from the whole numbers before they are packed: `scale * (code - zero)`, or `scale * e4m3`.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from tests.models.tiny import byte_tokenizer, hf_model

Array = NDArray[Any]
FAMILY = "Llama 2"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_PLACES = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}  # column of eight -> nibble


@dataclass(frozen=True)
class Layout:
    """`group` columns share a scale (0: a whole row). `symmetric`: every zero point is 8. `order`: columns' groups are shuffled."""

    config: dict[str, Any]
    group: int = 32
    symmetric: bool = True
    order: bool = False
    kind: str = "int4"


def _gptq(group: int, sym: bool, desc_act: bool, form: str = "gptq") -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": sym, "desc_act": desc_act, "checkpoint_format": form}


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}}


LAYOUTS = {
    "awq": Layout({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}, 64, False),
    "gptq": Layout(_gptq(128, True, False), 128),
    "gptq asymmetric": Layout(_gptq(32, False, False), 32, False),
    "gptq v2": Layout(_gptq(64, False, False, "gptq_v2"), 64, False),
    "gptq of whole rows": Layout(_gptq(-1, True, False), 0),
    "gptq in act order": Layout(_gptq(32, True, True), 32, order=True),
    "packed": Layout(_compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64, symmetric=True), 64),
    "packed asymmetric": Layout(
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False), 32, False),
    "packed by channel": Layout(_compressed("pack-quantized", num_bits=4, type="int", strategy="channel", symmetric=True), 0),
    "packed in act order": Layout(
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True, actorder="group"), 32,
        order=True),
    "fp8 by channel": Layout(_compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True), kind="channel"),
    "fp8 by tensor": Layout(_compressed("float-quantized", num_bits=8, type="float", strategy="tensor", symmetric=True), kind="tensor"),
    "fp8 of transformers": Layout({"quant_method": "fp8", "weight_block_size": [64, 32]}, kind="block"),
}  # fmt: skip


def words(numbers: Array, places: dict[int, int] | None = None) -> Array:
    """[rows, m] of 0..15 -> i32[rows, m / 8]; number j of eight goes to nibble places[j] (j)."""
    packed = np.zeros((numbers.shape[0], -(-numbers.shape[1] // 8)), np.uint32)
    for column in range(numbers.shape[1]):
        nibble = column % 8 if places is None else places[column % 8]
        packed[:, column // 8] |= numbers[:, column].astype(np.uint32) << np.uint32(4 * nibble)
    return packed.view(np.int32)


def write(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The checkpoint in layout `name`; what its tensors mean, f32."""
    layout, model = LAYOUTS[name], hf_model(FAMILY)
    rng = np.random.default_rng(5)
    stored: dict[str, Any] = {}
    meant: dict[str, torch.Tensor] = {}
    for path, tensor in model.state_dict().items():
        if path.split(".")[-2] in LINEARS and path.endswith("weight"):
            tensors, values = quantised(tensor.numpy(), layout, rng)
            stored |= {path.removesuffix("weight") + part: value for part, value in tensors.items()}
            meant[path] = torch.from_numpy(values)
        else:
            stored[path] = tensor.to(torch.bfloat16)
            meant[path] = stored[path].float()
    folder.mkdir(parents=True)
    save_file({path: (torch.from_numpy(np.ascontiguousarray(t)) if isinstance(t, np.ndarray) else t).contiguous().clone()
               for path, t in stored.items()}, folder / "model.safetensors")
    config = json.loads(model.config.to_json_string(use_diff=False))  # type: ignore[union-attr, operator]
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": layout.config}))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return meant


def model_of(meant: dict[str, torch.Tensor]) -> Any:
    """transformers' model with these weights."""
    model = copy.deepcopy(hf_model(FAMILY))
    model.load_state_dict(meant)
    return model


def quantised(w: Array, layout: Layout, rng: np.random.Generator) -> tuple[dict[str, Any], Array]:
    if layout.kind != "int4":
        return fp8(w, layout)
    n, k = w.shape
    group = layout.group or k
    index = np.arange(k) // group
    if layout.order:
        index = rng.permutation(index)
    low = np.stack([np.minimum(w[:, index == g].min(1), 0) for g in range(k // group)], 1)
    high = np.stack([np.maximum(w[:, index == g].max(1), 0) for g in range(k // group)], 1)
    if layout.symmetric:
        scales = (np.maximum(-low, high) / 7.5).astype(np.float16)
        zeros = np.full(scales.shape, 8)
    else:
        scales = ((high - low) / 15).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 1, 15).astype(int)
    wide = scales.astype(np.float32)[:, index]
    codes = np.clip(np.rint(w / wide) + zeros[:, index], 0, 15).astype(int)
    values = wide * (codes - zeros[:, index]).astype(np.float32)
    method = layout.config["quant_method"]
    if method == "awq":
        return {"qweight": words(codes.T, AWQ_PLACES), "qzeros": words(zeros.T, AWQ_PLACES), "scales": scales.T}, values
    if method == "gptq":
        below = 0 if layout.config["checkpoint_format"] == "gptq_v2" else 1
        return {"qweight": words(codes).T, "qzeros": words(zeros.T - below), "scales": scales.T, "g_idx": index.astype(np.int32)}, values
    parts: dict[str, Any] = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": np.array([n, k], np.int64)}
    if not layout.symmetric:
        parts["weight_zero_point"] = words(zeros.T).T
    if layout.order:
        parts["weight_g_idx"] = index.astype(np.int32)
    return parts, values


def fp8(w: Array, layout: Layout) -> tuple[dict[str, Any], Array]:
    """Scales as compressed-tensors has them, rounded to bf16; torch rounds to e4m3."""
    tensor = torch.from_numpy(w)
    if layout.kind == "channel":
        scale = (tensor.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    elif layout.kind == "tensor":
        scale = (tensor.abs().max().reshape(1) / 448).to(torch.bfloat16)
    else:
        rows, columns = layout.config["weight_block_size"]
        blocks = tensor.reshape(w.shape[0] // rows, rows, w.shape[1] // columns, columns)
        inverse = blocks.abs().amax((1, 3)) / 448
        wide = inverse.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        codes = (tensor / wide).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": inverse}, (codes.float() * wide).numpy()
    codes = (tensor / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, (codes.float() * scale.float()).numpy()
