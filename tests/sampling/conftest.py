"""Tests here share `native.py`; the kernels are built once per session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "runtime")]

from native import NativeSampler  # noqa: E402
from once_native import native_functions  # noqa: E402

SHAPES = {"tiny": (16, 8), "padded": (112, 100), "large": (5040, 5000)}  # columns, vocabulary; 5000 has two parts


@pytest.fixture(scope="session")
def samplers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], NativeSampler]:
    found = {name: NativeSampler(*shape) for name, shape in SHAPES.items()}
    functions = native_functions(tmp_path_factory, "sampling", [spec for sampler in found.values() for spec in sampler.specs])
    for sampler in found.values():
        sampler.functions = {spec.key: functions(spec.key) for spec in sampler.specs}
    return found.__getitem__
