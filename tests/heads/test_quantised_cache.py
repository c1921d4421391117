"""Levels with programs over a target whose cache is quantised in groups: the text is the target's, whatever they make of its pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.compiler import compile_model
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from tests.function_level import sends_all
from tests.heads.tiny import EAGLE3, EXIT, TREE_NODES, with_heads, write_heads
from tests.once import once

PROMPTS = [[(7 * i * j + 3) % 256 for i in range(5 + 40 * j)] for j in range(1, 5)]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Counts and an eagle merged, verified by the target's first layer over its int4 pages, verified by the target."""

    def make(folder: Path) -> None:
        eagle, leave = write_heads(folder / "e.safetensors", EAGLE3), write_heads(folder / "x.safetensors", EXIT)
        config = with_heads(tiny_model)
        config["target"] |= {"kv": {"dtype": "int4", "page_size": 32}}
        config["cascade"] = [
            {"merge": [{"kind": "ngram", "name": "counts", "max_nodes": 8, "min_probability": 0.01},
                       {"kind": "eagle", "name": "eagle", "heads": str(eagle), "max_nodes": 8, "window": 64}], "max_nodes": 12},
            {"kind": "self", "name": "first", "layers": 1, "exit": str(leave), "max_nodes": TREE_NODES, "depth": 4}]
        compile_model(config, folder / "int4.mlsdc")

    return once(tmp_path_factory, "heads-int4", make) / "int4.mlsdc"


def texts(engine: Engine, max_tokens: int, temperature: float = 0.0, *, draft: bool = True) -> list[list[int]]:
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=3, ignore_eos=True, speculation=None if draft else Speculation(enabled=False))
    return [result.token_ids for result in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_same_with_levels_and_without(artifact: Path, temperature: float) -> None:
    with Engine.load(artifact, threads=1) as engine:
        assert texts(sends_all(engine), 30, temperature) == texts(engine, 30, temperature, draft=False)
        assert engine.statistics.drafted > 100
        engine.check_integrity()


@pytest.mark.parametrize("num_pages", [25, 26, 28, 33])
def test_a_pool_full_of_drafts_stops_nobody(artifact: Path, num_pages: int) -> None:
    """The target takes back what drafting levels hold for preempted requests; in two of three such pools the queue once stood still
    for ever. 24 pages are too few for the longest."""
    with Engine.load(artifact, threads=1, num_pages=num_pages) as engine:
        assert texts(sends_all(engine), 80) == texts(engine, 80, draft=False)
        assert engine.statistics.preemptions > 0
        engine.check_integrity()
