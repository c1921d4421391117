"""Checkpoints quantised by others: every number as published, taken over without quantising again, and the artifact's text."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mlsdc.compiler import compile_model
from mlsdc.compiler.capture import ModelSource, load_source
from mlsdc.compiler.errors import CaptureError
from mlsdc.compiler.graph import Node, Weight
from mlsdc.compiler.quantise import F8, Q4, Q8
from mlsdc.compiler.types import DType, TensorType
from mlsdc.compiler.weight_origin import origin
from mlsdc.compiler.weights import read_weight
from mlsdc.runtime import Engine, SamplingParams
from tests.models.quantised_writer import LAYOUTS, LINEARS, model_of, write

NEW, CANDIDATES, CLEAR = 10, 48, 4
INT4 = [name for name in LAYOUTS if LAYOUTS[name].kind == "int4"]
ORDERED = [name for name in LAYOUTS if LAYOUTS[name].order]
KEPT = [name for name in INT4 if name not in ORDERED]
ROWS = ["fp8 by channel", "fp8 by tensor"]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@functools.cache
def checkpoint(name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    kept = tempfile.TemporaryDirectory(prefix="mlsdc-quantised-")
    _FOLDERS.append(kept)
    return Path(kept.name) / "tiny", write(Path(kept.name) / "tiny", name)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def source(name: str) -> ModelSource:
    return load_source(str(checkpoint(name)[0]))


def linears(name: str) -> list[str]:
    return [path for path in checkpoint(name)[1] if path.split(".")[-2] in LINEARS]


def packed(name: str, path: str, dtype: DType) -> Any:
    weights = source(name).weights
    return read_weight(Node("w", Weight((path,)), (), TensorType(dtype, weights.shape(path))), weights)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_is_what_the_layout_says_exactly(name: str) -> None:
    weights, meant = source(name).weights, checkpoint(name)[1]
    assert sorted(weights.names()) == sorted(meant)
    for path, values in meant.items():
        assert weights.shape(path) == tuple(values.shape), path
        assert np.array_equal(weights.read(path), values.numpy()), path


@pytest.mark.parametrize("name", KEPT)
def test_int8_takes_4_bit_weights_over_exactly(name: str) -> None:
    for path in linears(name):
        w = packed(name, path, DType.Q8)
        assert isinstance(w, Q8)
        assert np.array_equal(w.dequantise(), checkpoint(name)[1][path].numpy()), path


@pytest.mark.parametrize("name", KEPT)
def test_int4_keeps_every_code_and_scale_and_rounds_zero_points_to_f16(name: str) -> None:
    for path in linears(name):
        w, q8 = packed(name, path, DType.Q4), packed(name, path, DType.Q8)
        assert isinstance(w, Q4)
        assert np.array_equal(w.scales, q8.scales)
        zeros = w.codes.astype(int) - q8.codes  # the whole numbers, from the exact form
        exact = zeros.astype(np.float64) * np.repeat(w.scales, 32, 1).astype(np.float64)
        off = np.abs(np.repeat(w.mins, 32, 1).astype(np.float64) + exact)
        assert (off <= exact * 2.0**-11).all()
        assert not off.any() or not LAYOUTS[name].symmetric, path


@pytest.mark.parametrize("name", ROWS)
def test_fp8_takes_fp8_weights_over_exactly(name: str) -> None:
    for path in linears(name):
        w = packed(name, path, DType.F8)
        assert isinstance(w, F8)
        assert np.array_equal(w.dequantise(), checkpoint(name)[1][path].numpy()), path


@pytest.mark.parametrize(("name", "dtype", "words"), [
    ("gptq", DType.Q4, "q4 from int4: repacked as stored"),
    ("packed", DType.Q8, "q8 from int4: repacked as stored"),
    ("awq", DType.Q8, "q8 from int4 with zero points: repacked as stored"),
    ("awq", DType.Q4, "q4 from int4 with zero points: codes and scales as stored, zero points rounded to f16"),
    ("gptq in act order", DType.Q4, "q4 from numbers: quantised anew"),
    ("fp8 by channel", DType.F8, "f8 from fp8: repacked as stored"),
    ("fp8 by tensor", DType.Q8, "q8 from fp8: quantised anew"),
    ("fp8 of transformers", DType.F8, "f8 from numbers: quantised anew"),
])  # fmt: skip
def test_what_became_of_a_tensor_is_said_by_name(name: str, dtype: DType, words: str) -> None:
    assert origin(dtype, (Q_PROJ,), source(name).weights) == words


@functools.cache
@torch.no_grad()
def clear_prompts(name: str) -> list[tuple[list[int], list[int]]]:
    """Prompts whose greedy continuation by transformers on the float weights is least in doubt, and the continuation."""
    model = model_of(checkpoint(name)[1])
    prompts = torch.randint(0, 256, (CANDIDATES, 5), generator=torch.Generator().manual_seed(3))
    made = model.generate(prompts, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True)
    scores = torch.stack(made.logits)
    top = scores.topk(2, dim=-1).values
    best = ((top[..., 0] - top[..., 1]) / scores.std(-1)).min(0).values.argsort(descending=True)[:CLEAR].tolist()
    return [(prompts[i].tolist(), made.sequences[i, 5:].tolist()) for i in best]


@pytest.mark.parametrize(("name", "weights"), [("awq", "int4"), ("gptq asymmetric", "int8"), ("packed", "int4"), ("fp8 by channel", "fp8")])
def test_the_artifact_continues_as_transformers_does_on_the_float_weights(name: str, weights: str, tmp_path: Path) -> None:
    config = {
        "target": {"model": str(checkpoint(name)[0]), "weights": weights, "kv": {"dtype": "bf16", "page_size": 16}},
        "cascade": [{"kind": "ngram", "name": "lookup", "max_nodes": 7, "width": 2}],
        "memory": {"kv_pool": "2MiB"},
        "limits": {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64},
    }
    artifact = compile_model(config, tmp_path / "tiny.mlsdc")
    origins = json.loads((artifact / "explain.json").read_text())["weights"]
    assert not any("anew" in words and any("mlp" in path or "attn" in path for path in paths) for words, paths in origins.items()), origins
    with Engine.load(artifact, threads=1) as engine:
        results = engine.generate([prompt for prompt, _ in clear_prompts(name)], SamplingParams(max_tokens=NEW, ignore_eos=True))
    assert [result.token_ids for result in results] == [continuation for _, continuation in clear_prompts(name)]


# bad input


def changed(tmp_path: Path, name: str, tensors: Any = lambda held: held, config: Any = lambda facts: facts) -> str:
    """The checkpoint with tensors and quantization_config changed; its folder."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    for file in checkpoint(name)[0].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    facts = json.loads((folder / "config.json").read_text())
    facts["quantization_config"] = config(facts["quantization_config"])
    (folder / "config.json").write_text(json.dumps(facts))
    return str(folder)


def without(part: str) -> Any:
    return lambda held: {path: t for path, t in held.items() if path != Q_PROJ.removesuffix("weight") + part}


def scaled(part: str, make: Any) -> Any:
    return lambda held: {path: make(t).contiguous() if path == Q_PROJ.removesuffix("weight") + part else t for path, t in held.items()}


@pytest.mark.parametrize(("name", "part", "message"), [
    ("awq", "scales", "tiny: has 'model.layers.0.self_attn.q_proj.qweight' but no 'model.layers.0.self_attn.q_proj.scales'"),
    ("gptq", "qzeros", "tiny: has 'model.layers.0.self_attn.q_proj.qweight' but no 'model.layers.0.self_attn.q_proj.qzeros'"),
    ("packed", "weight_scale", "has 'model.layers.0.self_attn.q_proj.weight_packed' but no 'model.layers.0.self_attn.q_proj.weight_scale'"),
    ("packed asymmetric", "weight_zero_point", "but no 'model.layers.0.self_attn.q_proj.weight_zero_point'"),
    ("fp8 by tensor", "weight_scale", "has 'model.layers.0.self_attn.q_proj.weight' but no 'model.layers.0.self_attn.q_proj.weight_scale'"),
])  # fmt: skip
def test_a_missing_part_is_one_line(name: str, part: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError) as caught:
        load_source(changed(tmp_path, name, without(part)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "tensors", "config", "message"), [
    ("awq", lambda held: held, lambda facts: facts | {"group_size": 48}, "128 columns are no whole number of groups of 48 (group_size)"),
    ("gptq", lambda held: held, lambda facts: facts | {"group_size": 32}, "qzeros has shape [1, 16], expected [4, 16]"),
    ("packed", scaled("weight_scale", lambda t: t[:, :1]), lambda facts: facts, "weight_scale has shape [128, 1], expected [128, 2]"),
    ("packed", scaled("weight_packed", lambda t: t[:, :8]), lambda facts: facts, "weight_packed has shape [128, 8], expected [128, 16]"),
    ("gptq in act order", scaled("g_idx", lambda t: t + 2), lambda facts: facts, "g_idx names groups 2 to 5, there are 4"),
    ("fp8 by channel", scaled("weight_scale", lambda t: t[:7]), lambda facts: facts, "has shape [7, 1], expected [128, 1] or [1]"),
    ("fp8 of transformers", scaled("weight_scale_inv", lambda t: t[:1]), lambda facts: facts, "expected [2, 4]: one a block of 64 x 32"),
    ("fp8 by channel", scaled("weight_scale", lambda t: t * float("nan")), lambda facts: facts, "has values that are not finite"),
    ("packed", scaled("weight_shape", lambda t: t[:1]), lambda facts: facts, "weight_shape has shape [1], expected [2]"),
    ("awq", scaled("qweight", lambda t: t.float()), lambda facts: facts, "q_proj.qweight' has dtype F32, expected I32 or I64"),
])  # fmt: skip
def test_a_part_that_does_not_fit_is_one_line(name: str, tensors: Any, config: Any, message: str, tmp_path: Path) -> None:
    weights = load_source(changed(tmp_path, name, tensors, config)).weights
    with pytest.raises(CaptureError) as caught:
        weights.read(Q_PROJ)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "part"), [
    ("awq", "qweight"), ("gptq", "qweight"), ("packed", "weight_packed"), ("fp8 by tensor", "weight"),
])  # fmt: skip
def test_a_tensor_that_is_no_matrix_is_one_line(name: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=rf"^tiny: tensor '.*q_proj.{part}' has shape \[[0-9]+\], expected the two sizes of a linear's$"):
        load_source(changed(tmp_path, name, scaled(part, lambda t: t.reshape(-1))))


def test_blocks_with_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    weights = load_source(changed(tmp_path, "gptq", scaled("scales", lambda t: t * float("inf")))).weights
    with pytest.raises(CaptureError, match="'model.layers.0.self_attn.q_proj.scales' has values that are not finite"):
        weights.block(Q_PROJ)


@pytest.mark.parametrize(("name", "config", "message"), [
    ("awq", lambda facts: facts | {"quant_method": "bitsandbytes"},
     "tiny/config.json: quantization_config: quant_method 'bitsandbytes' is not known; known are awq, gptq, compressed-tensors, fp8"),
    ("awq", lambda facts: facts | {"version": "gemv"}, "quantization_config: version 'gemv'; known is gemm"),
    ("gptq", lambda facts: facts | {"bits": 3}, "quantization_config: bits is 3; known is 4"),
    ("gptq", lambda facts: facts | {"group_size": 0}, "group_size is 0, expected a number of columns, or -1 for a whole row"),
    ("gptq", lambda facts: facts | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'; known are gptq, gptq_v2"),
    ("packed", lambda facts: facts | {"format": "marlin-24"}, "4-bit int weights by group in format 'marlin-24'; known are"),
    ("packed", lambda facts: facts | {"config_groups": {}}, "has no 'config_groups'"),
    ("packed", lambda facts: None, "has 'model.layers.0.mlp.down_proj.weight_packed', but config.json has no 'quantization_config'"),
    ("fp8 by tensor", lambda facts: facts | {"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128]"),
    ("gptq", lambda facts: {"quant_method": "fp8"}, "config.json says it is quantised, but no tensor '*.weight' is F8_E4M3 is there"),
])  # fmt: skip
def test_a_way_of_quantising_that_is_not_known_is_one_line(name: str, config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError) as caught:
        load_source(changed(tmp_path, name, config=config))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
