"""The tiny model's artifacts with caches of other kinds, compiled once for all who test with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.laws.tiny import config, write_model
from tests.once import once

FORMATS: dict[str, dict[str, Any]] = {
    "per token": {"keys": "int8", "values": "int4-token"}, "grouped": {"dtype": "int4", "skip_layers": [0]},
}


def tiny_of(factory: pytest.TempPathFactory, kind: str) -> Path:
    """The artifact whose cache is of this kind; read only."""
    from mlsdc.compiler import compile_model

    model = once(factory, "laws-tiny-model", write_model)

    def make(folder: Path) -> None:
        given: dict[str, Any] = config(model)
        given["target"] = {**given["target"], "kv": {"page_size": 16, **FORMATS[kind]}}
        compile_model(given, folder / "tiny.mlsdc")

    return once(factory, f"laws-tiny-{kind.replace(' ', '-')}", make) / "tiny.mlsdc"
