"""Memory from model.yaml to a loaded engine: planned, refused with the table, allocated as planned."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mlsdc.compiler import compile_model
from mlsdc.compiler.cli import main
from mlsdc.compiler.config import MemoryConfig, load_config
from mlsdc.compiler.errors import ConfigError
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import CapacityError
from mlsdc.runtime.memory_plan import plan_artifact


def test_a_pool_too_small_for_one_sequence_does_not_compile_and_leaves_nothing(tiny_yaml: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(load_config(tiny_yaml), memory=MemoryConfig(kv_pool=30_000))
    with pytest.raises(ConfigError, match="memory.kv_pool: too small for target .*one sequence of 128 tokens needs") as caught:
        compile_model(config, tmp_path / "m.mlsdc")
    assert "target weights" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_total_too_small_does_not_compile(tiny_yaml: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="memory.total: too small for target .*: memory: .* bytes are needed, the budget is 1048576"):
        compile_model(tiny_yaml, tmp_path / "m.mlsdc", set=["memory={total: 1MiB}"])
    assert not list(tmp_path.iterdir())


def test_load_takes_what_the_budget_leaves_and_refuses_one_that_leaves_nothing(tiny: Path) -> None:
    artifact = Artifact.open(tiny)
    fixed = plan_artifact(artifact, artifact.pick_target("cpu"), kv_pool_bytes=0).fixed
    page = artifact.manifest.target_level.kv.page_bytes  # type: ignore[union-attr]
    with Engine.load(tiny, threads=1, memory_bytes=fixed + 7 * page) as engine:
        assert engine.pool.num_pages == 7
    with pytest.raises(CapacityError, match="kv pool: .* bytes; one sequence of 1 tokens needs"):
        Engine.load(tiny, threads=1, memory_bytes=fixed + page)
    with pytest.raises(CapacityError, match="the budget is 1000"):
        Engine.load(tiny, threads=1, memory_bytes=1000)


def test_inspect_shows_pages_memory_and_how_many_fit(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny), "--kv"]) == 0
    out = capsys.readouterr().out
    assert "target weights" in out
    assert "layers 0 to 1: bf16, 2 heads x (keys 1,024 + values 1,024) bytes" in out
    assert "128" in out.splitlines()[-2]
    assert out.splitlines()[-1].endswith("a step serves at most 4 (limits.max_num_seqs)")
