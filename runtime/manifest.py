"""manifest.json: everything a runtime must know before it touches a kernel. One truth, read and written here only (law L6)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlsdc.runtime.errors import ArtifactError, MlsdcError
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.step import Limits

FORMAT = 2


@dataclass(frozen=True)
class KernelVariant:
    """Another build of a kernel, with its arguments and the bits of its results: other warps, stages or tiles. `mlsdc tune` chooses.

    Of other tiles a launch has `grid` programs for `grain` of what it counts; 0: as the launch says.
    """

    entry: str
    file: str
    source: str
    checked_by: str
    resources: Mapping[str, int]
    grid: int = 0
    grain: int = 0


@dataclass(frozen=True)
class KernelInfo:
    """One compiled kernel: its entry in `file`, its generated source, and what it was checked by (`compiled`, `interpreted`,
    `emulated`: CUDA C++ whose source ran on a CPU, `ran`). It is what is launched unless a choice beside the artifact names a variant."""

    entry: str
    file: str
    source: str
    abi: tuple[str, ...]
    checked_by: str
    resources: Mapping[str, int] = field(default_factory=dict)
    variants: Mapping[str, KernelVariant] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetInfo:
    """Code for one kind of machine. `requires` are CPU features or compute capabilities, named as `mlsdc env` prints them. `exact`: a row's
    bits are the same whoever shares its step (law L2)."""

    name: str
    device: str
    requires: tuple[str, ...]
    files: tuple[str, ...]
    kernels: Mapping[str, KernelInfo]
    exact: bool = True


@dataclass(frozen=True)
class LevelInfo:
    """One level of the cascade, cheapest first; the last one is the target. `params` are the YAML's, checked.

    `programs` maps target name -> program name (`forward`, `commit`) -> file. Levels without weights (ngram) have none. `other_weights`
    maps the name of a target that lays tensors out otherwise than `weights` does -> the file of these; the rest it reads from `weights`.
    """

    name: str
    kind: str
    params: Mapping[str, Any]
    kv: KvGeometry | None = None
    weights: str | None = None
    programs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    other_weights: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelInfo:
    """Facts of the target model. `vocab_size` counts real tokens: padding ids beyond it are never chosen."""

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    weights_dtype: str
    source: str


@dataclass(frozen=True)
class Plan:
    """How the cascade runs: per level the most nodes it may propose. `off` (no speculation) is always possible (law L4)."""

    max_draft_tokens: int
    draft_tokens: int


@dataclass(frozen=True)
class Manifest:
    """`world_size` processes run the artifact together; `rank` is that of whoever reads it: a file holds 0, other ranks set their own."""

    model: ModelInfo
    limits: Limits
    levels: tuple[LevelInfo, ...]
    targets: tuple[TargetInfo, ...]
    plan: Plan
    files: Mapping[str, str]  # path in the artifact -> sha256, for all but weights
    weights: Mapping[str, tuple[int, str]]  # path -> (bytes, sha256 of the whole file)
    weight_headers: Mapping[str, str]  # path -> sha256 of the safetensors header, checked at load
    tools: Mapping[str, str]
    world_size: int = 1
    rank: int = 0
    format: int = FORMAT

    @property
    def target_level(self) -> LevelInfo:
        return self.levels[-1]

    def to_json(self) -> str:
        return seal(asdict(self))

    @staticmethod
    def from_json(text: str, where: Path | str) -> Manifest:
        """Raises ArtifactError, naming `where`, for another format number, anything malformed, or fields that are not its digest's."""
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise ArtifactError(
                    f"{where}: artifact format {raw['format']}, this runtime reads format {FORMAT}: run `mlsdc compile` again")
            manifest = Manifest(
                model=ModelInfo(**{**raw["model"], "eos_token_ids": tuple(raw["model"]["eos_token_ids"])}),
                limits=Limits(**raw["limits"]),
                levels=tuple(
                    LevelInfo(**{**x, "kv": KvGeometry(**x["kv"]) if x["kv"] else None}) for x in raw["levels"]),
                targets=tuple(
                    TargetInfo(
                        x["name"], x["device"], tuple(x["requires"]), tuple(x["files"]),
                        {k: _kernel(v) for k, v in x["kernels"].items()}, x["exact"])
                    for x in raw["targets"]),
                plan=Plan(**raw["plan"]),
                files=raw["files"],
                weights={k: (v[0], v[1]) for k, v in raw["weights"].items()},
                weight_headers=raw["weight_headers"],
                tools=raw["tools"],
                world_size=raw["world_size"],
                rank=raw["rank"],
                format=raw["format"],
            )
            if raw["digest"] != digest(raw):
                raise ArtifactError(f"{where}: it was edited: its fields are not those it was written with; compile again")
            return manifest
        except ArtifactError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, MlsdcError) as error:
            if isinstance(error, KeyError | TypeError) and is_whole(text):  # a field that is not there, or not known
                what = f"{type(error).__name__}: {error}"
                raise ArtifactError(f"{where}: another version of mlsdc wrote it ({what}): run `mlsdc compile` again") from None
            raise ArtifactError(f"{where}: not a manifest ({type(error).__name__}: {error}); compile again") from None


def _kernel(raw: Mapping[str, Any]) -> KernelInfo:
    variants = {name: KernelVariant(**variant) for name, variant in raw.get("variants", {}).items()}
    return KernelInfo(**{**raw, "abi": tuple(raw["abi"]), "variants": variants})


def seal(fields: Mapping[str, Any]) -> str:
    """A manifest's text: its fields, and their digest. Kernels are built for these limits and this cache: with others they would read
    beyond the end of buffers."""
    return json.dumps({**fields, "digest": digest(fields)}, indent=1, sort_keys=True) + "\n"


def is_whole(text: str) -> bool:
    """Whether these are the fields of a manifest as somebody sealed them, whatever they are."""
    try:
        raw = json.loads(text)
        return bool(raw["digest"] == digest(raw))
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def digest(fields: Mapping[str, Any]) -> str:
    """Sha256 of all fields but the digest itself."""
    plain = json.loads(json.dumps({name: value for name, value in fields.items() if name != "digest"}))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
