"""Linears over tensor maps in Triton's interpreter: the bits of linears over pointers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_linears_over_tensor_maps_have_the_bits_of_linears_over_pointers(root: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "0"}
    command = [sys.executable, "-m", "tests.targets.interpret_tma"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all as over pointers" in done.stdout
