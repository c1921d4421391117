"""Trees that grow on the device: the kernel's are those of the host, and the artifact has the list only where a tree grows by rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.compiler.module import LevelModule
from mlsdc.runtime.levels.grown import CHILDREN
from mlsdc.runtime.program import ProgramSpec, Tap
from mlsdc.targets.nvidia import NvidiaTarget
from tests.targets.attention_vectors import LIMITS
from tests.targets.in_interpreter import interpreted


def test_the_kernel_grows_the_trees_that_the_host_grows(root: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    assert "all as the host grows them" in interpreted(root, "interpret_grow")


def test_heads_that_guess_every_depth_at_once_have_no_rounds() -> None:
    medusa = ProgramSpec("draft", "medusa", 0, (), {"top.0": Tap(0, "f4", (4, 2 * CHILDREN + 1))})
    assert NvidiaTarget("h100", LIMITS).grow(LevelModule("medusa", "medusa", {"depth": 2}, {}), medusa, 100) is None
