"""`mlsdc eval` over real artifacts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlsdc.compiler.cli import main
from mlsdc.compiler.config import load_config
from mlsdc.compiler.config_record import config_json, read_record
from mlsdc.compiler.errors import CompileError
from mlsdc.runtime.artifact import Artifact


def test_the_16_bit_cache_differs_from_itself_by_exactly_nothing(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tiny), "--tokens", "300", "--window", "100", "--threads", "1", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    (found,) = report["formats"]
    assert (found["name"], found["rows"], found["kl"], found["max_kl"], found["change"], found["top1"]) == ("bf16", 297, 0, 0, 0, 1)
    assert found["bits"] == {"512": 16.0, "4096": 16.0, "32768": 16.0}
    assert len(report["sha256"]) == 64


def test_the_table_says_what_was_scored(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("all happy families are alike " * 8)
    assert main(["eval", str(tiny), "--text", str(text), "--tokens", "120", "--window", "60", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert f"text {text}" in out
    assert "tokens 120, window 60" in out
    assert "bf16" in out.splitlines()[-1]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--window", "129"], "--window: 129, but tiny.mlsdc was compiled for 128 tokens"),
    (["--tokens", "1"], "--tokens and --window: at least 2"),
    (["--text", "/no/such"], "--text: /no/such cannot be read"),
    (["--kv", "bf17", "--window", "64", "--model", "x"], "tiny.mlsdc/config.json: target.kv.dtype: 'bf17' is not allowed"),
    (["--kv", "{a", "--window", "64"], "--kv: {a is not a mapping"),
    (["--kv", "{page_size: 32}", "--window", "64"], "the model was the file or folder 'tiny': say where it lies with --model"),
])
def test_a_mistake_is_one_line(tiny: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tiny), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_artifact_remembers_its_config(tiny: Path, tiny_yaml: Path) -> None:
    config = load_config(tiny_yaml)
    model = str(tiny_yaml.parent / "tiny")
    found = read_record(Artifact.open(tiny), model=model)
    assert (found.cascade, found.memory, found.limits, found.hardware, found.passes) == (
        config.cascade, config.memory, config.limits, config.hardware, config.passes)
    assert found.target.kv == config.target.kv
    assert found.target.model == model


def test_the_record_holds_no_path_of_this_machine(tiny: Path, tiny_yaml: Path) -> None:
    text = Artifact.open(tiny).path("config.json").read_text()
    assert str(tiny_yaml.parent) not in text
    assert text == config_json(load_config(tiny_yaml), "tiny")


def test_an_artifact_without_a_record_says_so(tiny: Path) -> None:
    artifact = Artifact.open(tiny)
    files = {name: value for name, value in artifact.manifest.files.items() if name != "config.json"}
    object.__setattr__(artifact.manifest, "files", files)
    with pytest.raises(CompileError, match="older version"):
        read_record(artifact)


def test_the_figures_can_be_drawn(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="mlsdc[plot] is not installed")
    picture = tmp_path / "quality.png"
    assert main(["eval", str(tiny), "--tokens", "80", "--window", "80", "--threads", "1", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["eval", str(tiny), "--tokens", "80", "--window", "80", "--threads", "1", "--plot", str(tmp_path / "q.xyz")]) == 2
