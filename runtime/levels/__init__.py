"""Kinds of drafting levels; a kind's module is imported when an artifact has such a level."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.manifest import LevelInfo

KINDS: Mapping[str, str] = {
    "ngram": "mlsdc.runtime.levels.ngram:NgramLevel",
}


def make_level(info: LevelInfo, index: int) -> Level:
    """The level an artifact describes; `index` is its place in the manifest's level table. Raises ArtifactError."""
    if info.kind not in KINDS:
        raise ArtifactError(f"level '{info.name}': kind '{info.kind}' is not known to this runtime; kinds are {', '.join(KINDS)}")
    module, name = KINDS[info.kind].split(":")
    level: Level = getattr(import_module(module), name)(info, index)
    return level
