"""Experts in GGUF files: each is a tensor of its own, whether the file stacks them or not."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from mlsdc.compiler.capture.gguf_file import GgufFile
from mlsdc.compiler.capture.gguf_weights import GgufWeights
from mlsdc.compiler.errors import CaptureError

Q8_0 = gguf.GGMLQuantizationType.Q8_0
EXPERTS, ROWS, COLUMNS = 3, 4, 64
VALUES = np.random.default_rng(0).standard_normal((EXPERTS, ROWS, COLUMNS)).astype(np.float32)


def written(path: Path, tensors: dict[str, np.ndarray]) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    for name, values in tensors.items():
        writer.add_tensor(name, gguf.quants.quantize(values, Q8_0), raw_dtype=Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.fixture
def stacked(tmp_path: Path) -> GgufFile:
    return written(tmp_path / "stacked.gguf", {"blk.2.ffn_gate_exps.weight": VALUES})


@pytest.mark.parametrize(("architecture", "name"), [("llama", "w1"), ("qwen3moe", "gate_proj")])
def test_an_expert_of_a_stack_is_a_tensor(stacked: GgufFile, architecture: str, name: str) -> None:
    weights = GgufWeights(stacked, architecture, {}, EXPERTS)
    names = [f"model.layers.2.mlp.experts.{i}.{name}.weight" for i in range(EXPERTS)]
    assert list(weights.names()) == names
    wanted = gguf.quants.dequantize(gguf.quants.quantize(VALUES, Q8_0), Q8_0)
    for expert, (found, values) in enumerate(zip(map(weights.read, names), wanted, strict=True)):
        assert weights.shape(names[expert]) == found.shape == (ROWS, COLUMNS)
        assert np.array_equal(found, values)
        block = weights.block(names[expert])
        assert block is not None
        assert block.shape == (ROWS, COLUMNS)
        assert np.array_equal(gguf.quants.dequantize(block.rows, Q8_0), values)


def test_older_files_have_every_expert_by_itself(tmp_path: Path) -> None:
    file = written(tmp_path / "apart.gguf", {f"blk.2.ffn_down.{i}.weight": VALUES[i] for i in range(EXPERTS)})
    weights = GgufWeights(file, "llama", {}, EXPERTS)
    assert list(weights.names()) == [f"model.layers.2.mlp.experts.{i}.w2.weight" for i in range(EXPERTS)]
    assert np.array_equal(weights.read("model.layers.2.mlp.experts.1.w2.weight"), gguf.quants.dequantize(
        gguf.quants.quantize(VALUES[1], Q8_0), Q8_0))


def test_a_stack_of_another_number_of_experts_is_one_line(stacked: GgufFile) -> None:
    with pytest.raises(CaptureError, match=(
            r"^stacked\.gguf: tensor 'blk\.2\.ffn_gate_exps\.weight' has shape \[3, 4, 64\], expected that of 8 experts$")):
        GgufWeights(stacked, "llama", {}, 8)
