"""`mlsdc train --self-generate`: text by our own engine, from which counts and heads are made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlsdc.compiler.cli import dispatch
from mlsdc.compiler.errors import CompileError
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.levels.counts import Counts
from mlsdc.runtime.safetensors import SafetensorsFile


def interrupted(*args: Any, **options: Any) -> Engine:
    raise KeyboardInterrupt


TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def model(tiny_yaml: Path, tmp_path: Path) -> Path:
    """The tiny model with a chat template, and two prompts beside it."""
    shutil.copytree(tiny_yaml.parent, tmp_path / "m")
    (tmp_path / "m" / "tiny" / "chat_template.jinja").write_text(TEMPLATE)
    prompts = [{"messages": [{"role": "user", "content": text}]} for text in ("abcabc", "what?")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return tmp_path / "m" / "model.yaml"


def test_counts_and_heads_learn_from_what_the_model_says(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--data", str(tmp_path / "p.jsonl"), "--self-generate", "300"]
    assert dispatch(["train", str(model), "--level", "counts", *common, "-o", str(tmp_path / "own.counts")]) == 0
    assert Counts.open(tmp_path / "own.counts", 256).slots > 0
    heads = ["train", str(model), "--level", "heads", "--kind", "medusa", *common, "--draft-vocab", "64", "--num-heads", "1",
             "-o", str(tmp_path / "own.safetensors")]
    assert dispatch(heads) == 0
    assert "mlsdc_heads" in SafetensorsFile(tmp_path / "own.safetensors").metadata
    texts = [json.loads(line) for line in (tmp_path / "own.texts.jsonl").read_text().splitlines()]
    assert sum(len(text["tokens"]) - text["start"] for text in texts) >= 300
    assert {text["start"] for text in texts} == {len("abcabc"), len("what?")}
    capsys.readouterr()
    written = (tmp_path / "own.texts.jsonl").stat().st_mtime_ns
    assert dispatch(heads) == 0  # the same command again learns from the same text
    assert (tmp_path / "own.texts.jsonl").stat().st_mtime_ns == written
    assert "own.texts.jsonl is there and learned from: " in capsys.readouterr().out


def test_stopped_while_it_writes_it_goes_on_to_the_same_text(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(name: str) -> None:
        dispatch(["train", str(model), "--level", "counts", "--data", str(tmp_path / "p.jsonl"), "--self-generate", "500",
                  "-o", str(tmp_path / f"{name}.counts")])

    asked: list[int] = []
    generate = Engine.generate

    def counted(engine: Engine, prompts: Any, params: Any) -> Any:
        if len(asked) == stop:
            raise KeyboardInterrupt
        asked.append(len(prompts))
        return generate(engine, prompts, params)

    monkeypatch.setattr(Engine, "generate", counted)
    stop = -1
    train("whole")
    batches = len(asked)
    assert batches > 2
    asked, stop = [], 2
    with pytest.raises(KeyboardInterrupt):
        train("parts")
    (partial,) = tmp_path.glob("parts.texts.jsonl.*.partial")
    partial.write_text(partial.read_text() + '{"tokens": [1, 2')  # a line that was being written
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "load", interrupted)  # before anything new is there
        with pytest.raises(KeyboardInterrupt):
            train("parts")
    asked, stop = [], -1
    train("parts")
    assert len(asked) == batches - 2
    assert (tmp_path / "parts.texts.jsonl").read_bytes() == (tmp_path / "whole.texts.jsonl").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_kept_text_of_fewer_tokens_than_asked_for_is_not_taken(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.texts.jsonl").write_text('{"tokens": [1, 2, 3, 4, 5], "start": 2}\n')
    with pytest.raises(CompileError, match=r"^--self-generate: 300, but .*own.texts.jsonl is there, of 3 tokens: remove it for text anew$"):
        dispatch(["train", str(model), "--level", "counts", "--data", str(tmp_path / "p.jsonl"), "--self-generate", "300",
                  "-o", str(tmp_path / "own.counts")])


def test_a_number_of_tokens_is_wanted(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="--self-generate: 0, expected a number of tokens"):
        dispatch(["train", str(model), "--level", "counts", "--data", str(tmp_path / "p.jsonl"), "--self-generate", "0",
                  "-o", str(tmp_path / "own.counts")])
