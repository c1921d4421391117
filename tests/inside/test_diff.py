"""`mlsdc diff`: a right artifact is right, and one flipped bit is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlsdc.compiler import cli, compile_model
from mlsdc.compiler.cli_diff import diff
from mlsdc.runtime.artifact import Artifact
from tests.inside.model import Tiny

PROMPT = "A page of text, long enough to fill one."


def flipped(tiny: Tiny, folder: Path, weight: str, byte: int, bit: int) -> Path:
    """A copy of the artifact with one bit of a weight the other way."""
    copy = folder / "flipped.mlsdc"
    shutil.copytree(tiny.artifact, copy)
    start = Artifact.open(copy).weights("target").tensors[weight].begin
    with (copy / "weights" / "target.safetensors").open("r+b") as file:
        file.seek(start + byte)
        old = file.read(1)[0]
        file.seek(start + byte)
        file.write(bytes([old ^ 1 << bit]))
    return copy


def test_a_right_artifact_is_right_against_the_interpreter(tiny: Tiny) -> None:
    report = diff(Artifact.open(tiny.artifact), PROMPT, model=str(tiny.model))
    assert report.first_bad == ""
    assert not report.weights
    assert max(entry.own for entry in report.entries) < 0.01
    assert report.logits.kl < 1e-3
    assert {"embed", "layers.1.attn.kv", "layers.1.mlp.residual", "lm_head"} <= {entry.name for entry in report.entries}


def test_a_right_artifact_is_right_against_transformers(tiny: Tiny) -> None:
    report = diff(Artifact.open(tiny.artifact), PROMPT, "hf", str(tiny.model))
    assert [entry.name for entry in report.entries] == ["embed", "layers.0.mlp.residual", "layers.1.mlp.residual"]
    assert report.first_bad == ""
    assert report.logits.kl < 0.05


@pytest.mark.parametrize("weight", ["w.layers.0.attn.qkv", "w.layers.0.mlp.gate_up", "w.layers.1.attn.out", "w.layers.1.mlp.down"])
def test_the_lowest_bit_of_one_weight_names_its_layer(tiny: Tiny, tmp_path: Path, weight: str) -> None:
    report = diff(Artifact.open(flipped(tiny, tmp_path, weight, 64 + 5, 0)), PROMPT, model=str(tiny.model))
    assert report.first_bad == weight[2:10]
    assert report.weights == {weight: 1}


@pytest.mark.parametrize("reference", ["interpreter", "hf"])
def test_a_high_bit_shows_in_the_numbers_of_its_layer_and_of_no_other(tiny: Tiny, tmp_path: Path, reference: str) -> None:
    copy = flipped(tiny, tmp_path, "w.layers.1.attn.out", 1, 6)  # a scale's exponent
    report = diff(Artifact.open(copy), PROMPT, reference, str(tiny.model))
    assert {entry.name.split(".")[1] for entry in report.entries if entry.bad} == {"1"}


def test_the_command_line_says_what_is_wrong_and_fails(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = flipped(tiny, tmp_path, "w.layers.0.mlp.down", 64, 7)
    assert cli.main(["diff", str(copy), "--prompt", PROMPT, "--model", str(tiny.model)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "first bad layer: layers.0"


def test_a_checkpoint_that_is_gone_is_one_line(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(tiny.artifact, tmp_path / "alone.mlsdc")
    assert cli.main(["diff", str(tmp_path / "alone.mlsdc"), "--prompt", "x"]) == 2
    assert "name it with --model PATH" in capsys.readouterr().err


@pytest.mark.parametrize("kv", ["int4", "{keys: int2, values: int8, skip_layers: [0]}"])
def test_a_cache_that_quantises_groups_is_compared_too(tiny: Tiny, tmp_path: Path, kv: str) -> None:
    """Every pass is executed; and of 64 tokens the last rows read a page as quantised and the rest in 16 bits."""
    changes = f"target.kv={kv}", "target.kv.page_size=16"
    path = compile_model(tiny.yaml, tmp_path / "grouped.mlsdc", set=changes, verify_each=True)
    report = diff(Artifact.open(path), PROMPT * 2, model=str(tiny.model))
    assert report.tokens == 64
    assert report.first_bad == ""
    assert max(entry.own for entry in report.entries) < 0.01
    assert {"layers.0.attn.kv", "layers.1.attn.kv"} <= {entry.name for entry in report.entries}
