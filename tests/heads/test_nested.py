"""A level of the target's first layers that reads the high nibbles of its int8n cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.compiler import compile_model
from mlsdc.compiler.errors import ConfigError
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from tests.function_level import sends_all
from tests.heads.tiny import EXIT, TREE_NODES, with_heads, write_heads
from tests.once import once

PROMPTS = [[(7 * i * j + 3) % 256 for i in range(5 + 40 * j)] for j in range(1, 4)]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    def make(folder: Path) -> None:
        leave = write_heads(folder / "x.safetensors", EXIT)
        level = {"kind": "self", "name": "first", "layers": 1, "exit": str(leave), "max_nodes": TREE_NODES, "depth": 4, "kv": "high"}
        config = with_heads(tiny_model, level)
        config["target"] |= {"kv": {"dtype": "int8n", "page_size": 32}}
        compile_model(config, folder / "nested.mlsdc")

    return once(tmp_path_factory, "heads-nested", make) / "nested.mlsdc"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_targets(artifact: Path, temperature: float) -> None:
    with Engine.load(artifact, threads=1) as engine:
        plain = SamplingParams(max_tokens=30, temperature=temperature, seed=3, ignore_eos=True, speculation=Speculation(enabled=False))
        wanted = [result.token_ids for result in engine.generate(PROMPTS, plain)]
        drafted = SamplingParams(max_tokens=30, temperature=temperature, seed=3, ignore_eos=True)
        assert [result.token_ids for result in sends_all(engine).generate(PROMPTS, drafted)] == wanted
        assert engine.statistics.drafted > 50
        engine.check_integrity()


def test_only_the_level_reads_the_high_nibbles(artifact: Path) -> None:
    kernels = {path.name for path in (artifact / "kernels").rglob("attend_*")}
    assert any("coarse" in name for name in kernels)
    assert "coarse=true" in (artifact / "graph" / "first.ir").read_text()
    assert "coarse=true" not in (artifact / "graph" / "target.ir").read_text()


def test_a_view_of_another_cache_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = with_heads(tiny_model, {"kind": "self", "layers": 1, "max_nodes": TREE_NODES, "kv": "high"})
    with pytest.raises(ConfigError, match=r"cascade\[0\].kv: 'high' reads the high nibbles of an int8n cache, the target's is bf16"):
        compile_model(config, tmp_path / "x.mlsdc")
