"""The tiny model, made once for all workers."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.inside.model import Tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Two layers, 128 wide; tokens are bytes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "inside"
    folder.mkdir(exist_ok=True)
    from tests.inside.model import Tiny, make

    made = Tiny(folder / "tiny", folder / "model.yaml", folder / "tiny.mlsdc", folder / "dump")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.artifact.exists():
            make(made)
    return made
