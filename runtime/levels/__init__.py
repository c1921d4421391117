"""Kinds of drafting levels; a kind's module is imported when an artifact has such a level."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.base import NativeFunction
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.manifest import LevelInfo

KINDS: Mapping[str, str] = {
    "ngram": "mlsdc.runtime.levels.ngram_native:NativeNgramLevel",
    "medusa": "mlsdc.runtime.levels.medusa:MedusaLevel",
    "eagle": "mlsdc.runtime.levels.eagle:EagleLevel",
    "model": "mlsdc.runtime.levels.decoder:ModelLevel",
    "self": "mlsdc.runtime.levels.decoder:SelfLevel",
}


def make_level(info: LevelInfo, index: int, functions: Callable[[str], NativeFunction | None], artifact: Artifact) -> Level:
    """The level an artifact describes; `index` is its place in the manifest's level table, `functions` finds its native code.

    A kind's class has `load(info, index, functions, artifact)`. Raises ArtifactError.
    """
    if info.kind not in KINDS:
        raise ArtifactError(f"level '{info.name}': kind '{info.kind}' is not known to this runtime; kinds are {', '.join(KINDS)}")
    module, name = KINDS[info.kind].split(":")
    level: Level = getattr(import_module(module), name).load(info, index, functions, artifact)
    return level
