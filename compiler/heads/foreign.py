"""Heads of other trainers: Medusa's original layout, EAGLE-3 as SpecForge and `speculators` write it."""

from __future__ import annotations

from pathlib import Path

from mlsdc.compiler.capture import ModelSource
from mlsdc.compiler.errors import HeadError
from mlsdc.compiler.heads.checkpoint import HeadFile


def read_foreign(path: Path, kind: str, source: ModelSource) -> HeadFile:
    raise HeadError(f"{path.name}: not a file of `mlsdc train --level heads`")
