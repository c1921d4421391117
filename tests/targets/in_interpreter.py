"""Modules that execute kernels by Triton's interpreter, each in a process of its own: triton reads `TRITON_INTERPRET` once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "0"}


def interpreted(root: Path, name: str, *args: str) -> str:
    """What `python -m tests.targets.<name>` prints; it must end well."""
    done = subprocess.run([sys.executable, "-m", f"tests.targets.{name}", *args], cwd=root, capture_output=True, text=True,
                          env={**os.environ, **ENVIRONMENT})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
