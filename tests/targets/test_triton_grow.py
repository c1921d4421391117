"""Trees that grow on the device: the kernel's are those of the host, and the artifact has the list only where a tree grows by rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.compiler.module import LevelModule
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.kv_window import PARAM
from mlsdc.runtime.levels.grown import CHILDREN
from mlsdc.runtime.program import ProgramSpec, Tap
from mlsdc.targets.nvidia import NvidiaTarget
from tests.targets.attention_vectors import LIMITS
from tests.targets.in_interpreter import interpreted


def test_the_kernel_grows_the_trees_that_the_host_grows(root: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    assert "all as the host grows them" in interpreted(root, "interpret_grow")


def test_a_window_or_a_ring_keeps_a_model_from_drafting_ahead() -> None:
    """Rows that are kept for a step and not committed would move what is held."""
    draft = ProgramSpec("draft", "small", 0, (), {"top": Tap(0, "f4", (4, 2 * CHILDREN + 1))})
    programs, target = {"draft": draft, "trees": draft}, {"follow": draft, "forward": draft}
    h100 = NvidiaTarget("h100", LIMITS)
    level = LevelModule("small", "model", {"depth": 2}, {})
    found = h100.ahead(level, programs, target)
    assert found is not None
    assert found[-1] == "trees"
    windowed = LevelModule("small", "model", {"depth": 2, PARAM: {"window": 128, "sinks": 4}}, {})
    grouped = LevelModule("small", "model", {"depth": 2}, {}, KvGeometry("int4", 32, 1, 1, 64))
    assert h100.ahead(windowed, programs, target) is h100.ahead(grouped, programs, target) is None


def test_heads_that_guess_every_depth_at_once_have_no_rounds() -> None:
    medusa = ProgramSpec("draft", "medusa", 0, (), {"top.0": Tap(0, "f4", (4, 2 * CHILDREN + 1))})
    assert NvidiaTarget("h100", LIMITS).grow(LevelModule("medusa", "medusa", {"depth": 2}, {}), medusa, 100) is None
