"""Tests here serve the fake device of tests/runtime: a model one can compute by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for package in ("starlette", "pydantic", "prometheus_client", "httpx", "openai"):
    pytest.importorskip(package)
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))
