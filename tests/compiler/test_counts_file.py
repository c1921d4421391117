"""Counts that a model.yaml names are checked before minutes of work: file, vocabulary, tokenizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from mlsdc.compiler.config import parse_config
from mlsdc.compiler.counts import write_counts
from mlsdc.compiler.counts_file import counts_files, source_tokenizer_id
from mlsdc.compiler.errors import ConfigError


def source(*words: str) -> Any:
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    return SimpleNamespace(tokenizer_json=tokenizers.Tokenizer(model).to_str(), vocab_size=len(words), label="a model")


ABC = source("a", "b", "c", "d")


def files(folder: Path, of: Any) -> dict[str, bytes]:
    config = parse_config({"target": {"model": "m.gguf"}, "cascade": [{"kind": "ngram", "counts": "x.counts"}]}, folder=folder)
    return counts_files(config, of)


def write(folder: Path) -> Path:
    path = folder / "x.counts"
    write_counts(path, [([0, 1, 2, 3, 1], 0)], order=2, vocab_size=4, max_bytes=50_000, tokenizer=source_tokenizer_id(ABC), source="a test")
    return path


def test_counts_go_into_the_artifact_byte_for_byte(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert files(tmp_path, ABC) == {"counts/0.counts": path.read_bytes()}


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config: cascade\[0\].counts: .*x.counts: no such file"):
        files(tmp_path, ABC)


def test_counts_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=r"cascade\[0\].counts: x.counts: counts over a vocabulary of 4 tokens, the model has 5"):
        files(tmp_path, source("a", "b", "c", "d", "e"))


def test_counts_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=r"cascade\[0\].counts: x.counts: counted with another tokenizer than a model has"):
        files(tmp_path, source("a", "b", "d", "c"))


def test_corrupt_counts_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ConfigError, match=r"cascade\[0\].counts: x.counts: .* cut short"):
        files(tmp_path, ABC)
