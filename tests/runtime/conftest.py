"""Tests here share `fake_device.py`; importlib mode does not put their folder on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
