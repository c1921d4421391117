"""Trees that grow on the device: the kernel's are those of the host, and the artifact has the list only where a tree grows by rounds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlsdc.compiler.module import LevelModule
from mlsdc.runtime.levels.grown import CHILDREN
from mlsdc.runtime.program import ProgramSpec, Tap
from mlsdc.targets.nvidia import NvidiaTarget
from tests.targets.attention_vectors import LIMITS


def test_the_kernel_grows_the_trees_that_the_host_grows(root: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "0"}
    done = subprocess.run([sys.executable, "-m", "tests.targets.interpret_grow"], cwd=root, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all as the host grows them" in done.stdout


def test_heads_that_guess_every_depth_at_once_have_no_rounds() -> None:
    medusa = ProgramSpec("draft", "medusa", 0, (), {"top.0": Tap(0, "f4", (4, 2 * CHILDREN + 1))})
    assert NvidiaTarget("h100", LIMITS).grow(LevelModule("medusa", "medusa", {"depth": 2}, {}), medusa, 100) is None
