"""An artifact with heads, compiled once for all workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.heads.tiny import EAGLE3, EXIT, MEDUSA, with_heads, write_heads, write_small
from tests.laws.tiny import TREE_NODES, write_model
from tests.once import once


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model the tiny artifacts are compiled from."""
    return once(tmp_path_factory, "laws-tiny-model", write_model)


@pytest.fixture(scope="session")
def merged(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Counts, an eagle of three taps and a medusa that sees the known next token, merged."""
    from mlsdc.compiler import compile_model

    def make(folder: Path) -> None:
        eagle = write_heads(folder / "eagle.safetensors", EAGLE3)
        medusa = write_heads(folder / "medusa.safetensors", MEDUSA)
        compile_model(with_heads(
            tiny_model, {"kind": "ngram", "name": "counts", "max_nodes": TREE_NODES, "min_probability": 0.01},
            {"kind": "eagle", "name": "eagle", "heads": str(eagle), "max_nodes": TREE_NODES, "window": 64},
            {"kind": "medusa", "name": "medusa", "heads": str(medusa), "max_nodes": TREE_NODES, "window": 64}), folder / "merged.mlsdc")

    return once(tmp_path_factory, "heads-merged", make) / "merged.mlsdc"


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model with the target's tokens."""
    return once(tmp_path_factory, "heads-small-model", write_small)


@pytest.fixture(scope="session")
def stacked(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, small_model: Path) -> Path:
    """Counts, verified by a smaller model, verified by the target's first layer with an exit, verified by the target."""
    from mlsdc.compiler import compile_model

    def make(folder: Path) -> None:
        exit_file = write_heads(folder / "exit.safetensors", EXIT)
        cascade = [
            {"kind": "ngram", "name": "counts", "max_nodes": 8, "min_probability": 0.01},
            {"kind": "model", "name": "small", "model": str(small_model), "max_nodes": 12, "depth": 4},
            {"kind": "self", "name": "first", "layers": 1, "exit": str(exit_file), "max_nodes": TREE_NODES, "depth": 4}]
        compile_model({**with_heads(tiny_model), "cascade": cascade}, folder / "stacked.mlsdc")

    return once(tmp_path_factory, "heads-stacked", make) / "stacked.mlsdc"
