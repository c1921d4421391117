"""`random:SHAPE`: a model of random weights, made tensor by tensor from a seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlsdc.compiler.capture import load_source
from mlsdc.compiler.capture.random_source import byte_tokenizer
from mlsdc.compiler.check_tokenizer import check_tokenizer
from mlsdc.compiler.cli import main
from mlsdc.compiler.errors import CaptureError
from mlsdc.compiler.roofline_shapes import SHAPES, Shape
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.sampling_params import SamplingParams

MLP = "model.layers.0.mlp.down_proj.weight"
NUMBERS = [-0.04076, 0.136006, 0.166508]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SHAPES, "tiny", Shape(64, 96, 2, 4, 2, 32, 320, tied=True))
    return "random:tiny"


def test_a_seed_and_a_name_are_the_numbers(tiny: str) -> None:
    weights = load_source(tiny).weights
    assert np.array_equal(weights.read(MLP), load_source(f"{tiny}/seed=0").weights.read(MLP))
    assert not np.array_equal(weights.read(MLP), load_source(f"{tiny}/seed=1").weights.read(MLP))
    assert not np.array_equal(weights.read(MLP), weights.read(MLP.replace("0", "1")))


def test_the_numbers_are_these_with_any_numpy(tiny: str) -> None:
    assert [round(float(x), 6) for x in load_source(tiny).weights.read(MLP)[0, :3]] == NUMBERS


def test_rows_of_variance_one_stay_so(tiny: str) -> None:
    values = load_source(tiny).weights.read(MLP)
    assert values.shape == (64, 96)
    assert abs(values.mean()) < 0.01
    assert values.std() * 96**0.5 == pytest.approx(1, abs=0.03)
    assert np.array_equal(load_source(tiny).weights.read("model.norm.weight"), np.ones(64))


def test_layers_are_as_many_as_asked_for() -> None:
    source = load_source("random:llama-3-8b/layers=3/seed=5")
    assert source.label == "random:llama-3-8b/layers=3/seed=5"
    assert source.config["num_hidden_layers"] == 3
    assert sum(name.endswith("q_proj.weight") for name in source.weights.names()) == 3
    assert source.weights.shape("lm_head.weight") == (128256, 4096)


def test_every_token_reads_as_something_and_text_comes_back(tiny: str) -> None:
    source = load_source(tiny)
    check_tokenizer(source)
    assert source.vocab_size == len(byte_tokenizer(320)["model"]["vocab"]) == 320


@pytest.mark.parametrize(("ref", "message"), [
    ("random:llama-9", "'random:llama-9': 'llama-9' is not a shape; shapes are llama-3.2-1b, "),
    ("random:llama-3-8b/layers=0", "'layers=0': expected layers=N"),
    ("random:llama-3-8b/seed=1/seed=2", "'seed=2': expected layers=N"),
    ("random:llama-3-8b/heads=2", "'heads=2': expected layers=N"),
    ("random:", "'' is not a shape"),
])
def test_what_is_not_known_is_one_line(ref: str, message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        load_source(ref)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_artifact_of_one_says_so_and_generates(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "model.yaml"
    config.write_text(f"target: {{model: {tiny}/layers=1/seed=4}}\nmemory: {{kv_pool: 1MiB}}\n"
                      "limits: {max_model_len: 64, max_num_seqs: 1, max_num_batched_tokens: 16}\n")
    assert main(["compile", str(config), "-o", str(tmp_path / "tiny.mlsdc"), "--no-cache"]) == 0
    manifest = Artifact.open(tmp_path / "tiny.mlsdc").manifest
    assert (manifest.model.name, manifest.model.source) == ("random-tiny", "random:tiny/layers=1/seed=4")
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "tiny.mlsdc")]) == 0
    assert "source     random:tiny/layers=1/seed=4: random numbers, its words mean nothing" in capsys.readouterr().out
    with Engine.load(tmp_path / "tiny.mlsdc", threads=1) as engine:
        (result,) = engine.generate(["ab"], SamplingParams(max_tokens=5))
    assert len(result.token_ids) == 5  # no token ends a text
