"""Grouped cache formats through Triton's interpreter (law L3): pages and rows have the same bits however a sequence grew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")


@pytest.mark.parametrize(("name", "until"), [("int2", 66), ("sinks", 60), ("int3", 66)])
def test_pages_and_rows_do_not_depend_on_how_a_sequence_grew(root: Path, name: str, until: int) -> None:
    """`int4`, `mixed` and `skipped` of the same module take minutes: run them by hand (docs/gpu.md)."""
    done = run(root, str(until), name)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{name} rows are off by" in done.stdout


def test_a_commit_copies_all_of_a_token_and_nothing_else(root: Path) -> None:
    done = run(root, "0", "commits")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "commits of int8n" in done.stdout


def run(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.targets.interpret_grouped", *args]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "0"}
    return subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)
