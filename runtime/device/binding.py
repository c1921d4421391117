"""What any device needs to bind a level of an artifact: its step buffers, and its weights by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.levels.grown import grown_widths
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.program import InputArg, ProgramSpec
from mlsdc.runtime.step import Array, StepBuffers, mask_words

NO_PAGES = 32  # page size of a level that has none


def level_info(artifact: Artifact, level: str) -> LevelInfo:
    """Raises ArtifactError if the target level has no KV geometry."""
    manifest = artifact.manifest
    info = next(x for x in manifest.levels if x.name == level)
    if info.kv is None and info is manifest.target_level:
        raise ArtifactError(f"level '{level}' has no KV geometry; compile again")
    return info


def input_widths(params: Mapping[str, Any], specs: Iterable[ProgramSpec], vocab_size: int) -> dict[str, int]:
    """Widths of the step inputs that not every level has."""
    given: Mapping[str, int] = params.get("widths") or {}
    used = {arg.input for spec in specs for launch in spec.launches for arg in launch.args if isinstance(arg, InputArg)}
    widths = {name: width for name, width in given.items() if name != "draft_ids" or name in used}
    if "masks" in used:
        widths["masks"] = mask_words(vocab_size)
    if "growth" in used:
        widths |= grown_widths(given, used)
    return widths


def step_buffers(artifact: Artifact, info: LevelInfo, specs: Mapping[str, ProgramSpec]) -> StepBuffers:
    """The level's step buffers in host memory, as wide as its programs read them."""
    widths = input_widths(info.params, specs.values(), artifact.manifest.model.vocab_size)
    page_size, tail = (info.kv.page_size, info.kv.tail) if info.kv else (NO_PAGES, None)
    return StepBuffers(artifact.manifest.limits, page_size, widths, tail)


def weight_tensors(artifact: Artifact, info: LevelInfo, target: str) -> dict[str, Array]:
    """Memory-mapped tensors by name, laid out for the target of that name: the level's own, and what lies with the target level's."""
    own = artifact.level_weights(info.name, target)
    found = {name: own.tensor(name) for name in own.files}
    shared = info.params.get("shared") or {}
    if shared:
        lender = artifact.level_weights(artifact.manifest.target_level.name, target)
        found |= {name: lender.tensor(of) for name, of in shared.items()}
    return found
