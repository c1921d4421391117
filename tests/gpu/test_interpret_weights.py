"""Other weights than int8 through the GPU program: device `interpret` says what the CPU says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.sampling_params import SamplingParams
from tests.gpu.tiny import config
from tests.once import once

PROMPTS = [list(b"abca"), list(b"zz")]


def said(path: Path, device: str) -> list[list[int]]:
    with Engine.load(path, device=device, num_pages=30) as engine:
        results = engine.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True))
        return [list(result.token_ids) for result in results]


@pytest.mark.parametrize("weights", ["int4", "bf16", "fp8-a8"])
def test_texts_are_the_cpus(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, weights: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    from mlsdc.compiler import compile_model

    def make(folder: Path) -> None:
        for hardware in ("h100", "cpu-native"):
            compile_model(config(tiny_model, hardware, weights=weights), folder / f"{hardware}.mlsdc")

    folder = once(tmp_path_factory, f"gpu-tiny-{weights}", make)
    assert said(folder / "h100.mlsdc", "interpret") == said(folder / "cpu-native.mlsdc", "cpu")
