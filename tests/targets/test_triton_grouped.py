"""Grouped cache formats through Triton's interpreter (law L3): pages and rows have the same bits however a sequence grew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.targets.in_interpreter import interpreted

pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")


@pytest.mark.parametrize(("name", "until"), [("int2", 66), ("sinks", 60), ("int3", 66)])
def test_pages_and_rows_do_not_depend_on_how_a_sequence_grew(root: Path, name: str, until: int) -> None:
    """`int4`, `mixed` and `skipped` of the same module take minutes: run them by hand (docs/gpu.md)."""
    assert f"{name} rows are off by" in interpreted(root, "interpret_grouped", str(until), name)


def test_a_commit_copies_all_of_a_token_and_nothing_else(root: Path) -> None:
    assert "commits of int8n" in interpreted(root, "interpret_grouped", "0", "commits")
