"""The tiny artifact, compiled once for all workers from a folder in the Hugging Face format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlsdc.runtime.engine import Engine
from tests.laws.tiny import config, write_model
from tests.once import once


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model the tiny artifact is compiled from."""
    return once(tmp_path_factory, "laws-tiny-model", write_model)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The tiny artifact; read only."""
    from mlsdc.compiler import compile_model

    def make(folder: Path) -> None:
        compile_model(config(tiny_model), folder / "tiny.mlsdc")

    return once(tmp_path_factory, "laws-tiny", make) / "tiny.mlsdc"


@pytest.fixture(scope="session")
def tiny_engine(tiny: Path) -> Iterator[Engine]:
    """Two threads over 200 pages; tests make engines of their own over its device (`rows.engine_over`)."""
    with Engine.load(tiny, threads=2, num_pages=200) as engine:
        yield engine
