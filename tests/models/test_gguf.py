"""Families from GGUF files: the same weights give the same logits; block formats give the gguf package's own numbers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from mlsdc.compiler.capture import load_source
from mlsdc.compiler.capture.gguf_blocks import GGML_TYPES, dequantise
from mlsdc.compiler.capture.torch_export import capture_model
from mlsdc.compiler.families import SOURCES
from mlsdc.compiler.interpret import interpret
from tests.models.gguf_writer import write_gguf
from tests.models.tiny import BY_NAME, hf_model, proven_by, tokens_for, weight_reader


@pytest.mark.parametrize("name", proven_by("gguf"))
@torch.no_grad()
def test_a_gguf_file_gives_transformers_logits(name: str, tmp_path: Path) -> None:
    source = load_source(str(write_gguf(tmp_path / "tiny.gguf", hf_model(name), BY_NAME[name].gguf)))
    found = capture_model(source)
    tokens = tokens_for(name, 80)
    logits = interpret(found.graph, {"tokens": tokens[None].int()}, weight_reader(found))["logits"]
    assert isinstance(logits, torch.Tensor)
    assert (logits[0] - hf_model(name)(tokens[None]).logits[0]).abs().max() < 1e-4


@pytest.mark.parametrize("kind", [source.block for source in SOURCES if source.proof == "exact"])
def test_blocks_of_any_bytes_are_dequantised_as_the_gguf_package_does(kind: str) -> None:
    (type_,) = (t for t in GGML_TYPES.values() if t.name == kind)
    raw = np.random.default_rng(0).integers(0, 256, (64, type_.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).astype(np.float32).reshape(-1)
        found = dequantise(type_, raw.reshape(-1), (64 * type_.block,))
    assert np.array_equal(found, wanted, equal_nan=True)
    assert np.isfinite(found).any()


def test_every_block_format_that_is_read_is_in_the_table() -> None:
    assert {source.block for source in SOURCES if source.block} == {type_.name for type_ in GGML_TYPES.values()}
