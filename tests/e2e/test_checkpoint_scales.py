"""Scales of a checkpoint's KV cache, from its files through a whole compile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlsdc.compiler import compile_model
from mlsdc.compiler.errors import CaptureError


def with_scales(tiny_yaml: Path, folder: Path, value: float, name: str = "{half}_scale") -> Path:
    """The tiny model with a scale for the keys and values of both layers."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_yaml.parent, folder)
    tensors = load_file(folder / "tiny" / "model.safetensors")
    for layer in range(2):
        for half in ("k", "v"):
            tensors[f"model.layers.{layer}.self_attn.{name.format(half=half)}"] = torch.tensor([value if layer else 0.5])
    save_file(tensors, folder / "tiny" / "model.safetensors", {"format": "pt"})
    return folder / "model.yaml"


@pytest.mark.parametrize(("value", "message"), [
    (0.0, "tensor 'model.layers.1.self_attn.k_scale': layer 1: scale 0, expected a positive finite number"),
    (-2.0, "layer 1: scale -2, expected a positive finite number"),
    (float("nan"), "tensor 'model.layers.1.self_attn.k_scale' has values that are not finite"),
])
def test_a_broken_scale_ends_the_compile_and_leaves_nothing(tiny_yaml: Path, tmp_path: Path, value: float, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        compile_model(with_scales(tiny_yaml, tmp_path / "model", value), tmp_path / "m.mlsdc", set=["target.kv=int8"])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_scale_of_a_kind_that_is_not_known_ends_the_compile(tiny_yaml: Path, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="has tensor 'model.layers.0.self_attn.k_zero_scale'"):
        compile_model(with_scales(tiny_yaml, tmp_path / "model", 0.5, "{half}_zero_scale"), tmp_path / "m.mlsdc")


def test_good_scales_compile(tiny_yaml: Path, tmp_path: Path) -> None:
    assert compile_model(with_scales(tiny_yaml, tmp_path / "model", 0.25), tmp_path / "m.mlsdc").is_dir()
