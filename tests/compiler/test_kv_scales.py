"""Scales of a checkpoint's KV cache: every way of naming them loads, anything that is no scale is one line with layer and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlsdc.compiler.errors import CaptureError
from mlsdc.compiler.kv_scales import read_kv_scales, scale_name

LAYERS, HEADS = 3, 2


class Tensors:
    """A checkpoint of these tensors."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = {name: np.asarray(value, np.float32) for name, value in tensors.items()}

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str) -> Any:
        return self.tensors[name]

    def block(self, name: str) -> None:
        return None


def named(pattern: str, keys: Any = 0.5, values: Any = 0.25) -> dict[str, Any]:
    return {pattern.format(layer=i, half=half): value for i in range(LAYERS) for half, value in (("k", keys), ("v", values))}


@pytest.mark.parametrize(("style", "pattern"), [
    ("attention", "model.layers.{layer}.self_attn.{half}_scale"),
    ("attention", "model.layers.{layer}.self_attn.attn.{half}_scale"),
    ("projection", "model.layers.{layer}.self_attn.{half}_proj.output_scale"),
    ("projection", "model.layers.{layer}.self_attn.{half}_proj.{half}_scale"),
    ("fused", "model.layers.{layer}.self_attn.qkv_proj.{half}_scale"),
])
@pytest.mark.parametrize("shape", [(), (1,), (HEADS,), (HEADS, 1)])
def test_every_naming_loads_per_tensor_and_per_head(style: str, pattern: str, shape: tuple[int, ...]) -> None:
    tensors = {"model.embed.weight": [1.0], **named(pattern, np.full(shape, 0.5), np.full(shape, 0.25))}
    scales = read_kv_scales(Tensors(tensors), None, LAYERS, HEADS, "m")
    assert scales is not None
    assert scales.style == style
    for layer in range(LAYERS):
        assert set(scales.keys[layer].tolist()) == {0.5}
        assert set(scales.values[layer].tolist()) == {0.25}
        assert scales.largest_key(layer) == 224


def test_one_scale_for_both_loads() -> None:
    scales = read_kv_scales(Tensors({f"model.layers.{i}.self_attn.kv_scale": [2.0] for i in range(LAYERS)}), None, LAYERS, HEADS, "m")
    assert scales is not None
    assert scales.keys[1].tolist() == scales.values[1].tolist() == [2.0]


@pytest.mark.parametrize("name", ["kv_cache_scales.json", "kv_cache_scaling.json"])
@pytest.mark.parametrize("split", [False, True])
def test_a_json_file_loads(tmp_path: Path, name: str, split: bool) -> None:
    layers: dict[str, Any] = {str(i): 0.5 for i in range(LAYERS)}
    factors = {"0": {"k": layers, "v": {str(i): [0.25] * HEADS for i in range(LAYERS)}} if split else layers}
    (tmp_path / name).write_text(json.dumps({"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": factors}}))
    scales = read_kv_scales(Tensors({}), tmp_path, LAYERS, HEADS, "m")
    assert scales is not None
    assert scales.keys[2].tolist() == [0.5]
    assert scales.values[2].tolist() == ([0.25, 0.25] if split else [0.5])


def test_a_checkpoint_without_scales_has_none(tmp_path: Path) -> None:
    tensors = Tensors({"model.layers.0.self_attn.k_proj.weight": [1.0], "model.layers.0.self_attn.k_proj.weight_scale": [1.0]})
    assert read_kv_scales(tensors, tmp_path, LAYERS, HEADS, "m") is None
    assert scale_name("model.layers.0.self_attn.k_proj.weight_scale") is None


PATTERN = "model.layers.{layer}.self_attn.{half}_scale"


@pytest.mark.parametrize(("value", "message"), [
    (0.0, "layer 1: scale 0, expected a positive finite number"),
    (-0.5, "layer 1: scale -0.5, expected a positive"),
    (float("nan"), "layer 1: scale nan, expected a positive"),
    (float("inf"), "layer 1: scale inf, expected a positive"),
    ([0.5, 0.0], "layer 1: scale 0, expected a positive"),
    ([0.5, 0.5, 0.5], r"layer 1: shape \[3\], expected one scale, or one for each of 2 heads"),
])
def test_what_is_no_scale_is_named_with_its_layer_and_value(value: Any, message: str) -> None:
    tensors = {**named(PATTERN), "model.layers.1.self_attn.k_scale": value}
    with pytest.raises(CaptureError, match=f"m: tensor 'model.layers.1.self_attn.k_scale': {message}"):
        read_kv_scales(Tensors(tensors), None, LAYERS, HEADS, "m")


def test_a_missing_layer_is_not_one() -> None:
    tensors = named(PATTERN)
    del tensors["model.layers.2.self_attn.v_scale"]
    with pytest.raises(CaptureError, match="layer 2 has no scale of its values, 2 of 3 layers have one; .* is not 1.0"):
        read_kv_scales(Tensors(tensors), None, LAYERS, HEADS, "m")


def test_a_layer_too_many_is_named() -> None:
    tensors = {**named(PATTERN), "model.layers.3.self_attn.k_scale": 0.5}
    with pytest.raises(CaptureError, match="layer 3, the model has 3"):
        read_kv_scales(Tensors(tensors), None, LAYERS, HEADS, "m")


def test_two_ways_at_once_are_refused() -> None:
    tensors = named(PATTERN)
    moved = {name.replace("k_scale", "k_proj.output_scale"): value for name, value in tensors.items()}
    with pytest.raises(CaptureError, match="named in two ways"):
        read_kv_scales(Tensors(moved), None, LAYERS, HEADS, "m")
    both = {**tensors, "model.layers.0.self_attn.k_proj.output_scale": 0.5}
    with pytest.raises(CaptureError, match="layer 0 has a scale of its keys already"):
        read_kv_scales(Tensors(both), None, LAYERS, HEADS, "m")


@pytest.mark.parametrize(("text", "message"), [
    ("[", "expected kv_cache.scaling_factor"),
    ('{"kv_cache": {"scaling_factor": [1, 2]}}', "expected kv_cache.scaling_factor"),
    ('{"kv_cache": {"scaling_factor": {"0": {"0": 1}, "1": {"0": 1}}}}', "scales of 2 ranks, expected those of one"),
    ('{"kv_cache": {"scaling_factor": {"0": {"first": 1}}}}', "layer 'first', expected a number"),
    ('{"kv_cache": {"scaling_factor": {"0": {"0": NaN}}}}', "layer 0: scale nan"),
    ('{"kv_cache": {"scaling_factor": {"0": {"0": "big"}}}}', "layer 0: 'big' is not a scale"),
    ('{"kv_cache": {"scaling_factor": {"0": {"0": 1}}}}', "layer 1 has no scale of its keys, 1 of 3 layers have one"),
])
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "kv_cache_scales.json").write_text(text)
    with pytest.raises(CaptureError, match=message) as caught:
        read_kv_scales(Tensors({}), tmp_path, LAYERS, HEADS, "m")
    assert "\n" not in str(caught.value)
