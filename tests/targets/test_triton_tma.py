"""Linears over tensor maps in Triton's interpreter: the bits of linears over pointers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.targets.in_interpreter import interpreted


def test_linears_over_tensor_maps_have_the_bits_of_linears_over_pointers(root: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    assert "all as over pointers" in interpreted(root, "interpret_tma")
