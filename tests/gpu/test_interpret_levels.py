"""Levels through their GPU programs: heads, a smaller model and the target's first layers draft what they draft on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.once import once

pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")

from tests.gpu.interpret_levels import PROMPTS, Said, compile_case, say, write_checkpoints


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Counts, a medusa and an eagle merged; judged by the target's first layer, that by a model, that by the target over an int8 cache."""

    def make(folder: Path) -> None:
        write_checkpoints(folder)
        compile_case("all", "int8", folder, folder / "all.mlsdc")

    return once(tmp_path_factory, "gpu-levels", make) / "all.mlsdc"


@pytest.fixture(scope="module")
def cpu(artifact: Path) -> Said:
    return say(artifact, "cpu", PROMPTS, 5)


@pytest.fixture(scope="module")
def gpu(artifact: Path) -> Said:
    return say(artifact, "interpret", PROMPTS, 5)


def test_texts_are_the_cpus(cpu: Said, gpu: Said) -> None:
    assert gpu.texts == cpu.texts


def test_every_tree_is_the_cpus(cpu: Said, gpu: Said) -> None:
    assert gpu.trees == cpu.trees
    assert any(len(tokens) > 2 for tokens, _ in gpu.trees)


def test_as_much_is_accepted(cpu: Said, gpu: Said) -> None:
    """The top level is a model with the target's weights."""
    assert (gpu.drafted, gpu.accepted) == (cpu.drafted, cpu.accepted)
    assert gpu.accepted["twin"] > 0
