"""Cascade items with programs, as model.yaml writes them: heads, a smaller model, the target's own first layers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mlsdc.compiler.config_kv import DraftKvConfig, kv_section
from mlsdc.compiler.schema import option
from mlsdc.runtime.step import SCRATCH_SLOTS

PRIVATE = ("kind", "name", "heads", "model", "exit", "vocabulary_map", "kv")  # names and paths of the machine that compiles


@dataclass(frozen=True)
class ProgramLevel:
    """What all of them share. At most `max_nodes` nodes are proposed, none whose path is less likely than `min_probability`, and at most
    `depth` deep."""

    max_nodes: int = option(16, low=1, high=SCRATCH_SLOTS - 1)
    min_probability: float = option(0.0, low=0.0, high=1.0)
    depth: int = option(8, low=1, high=16)

    def params(self) -> dict[str, Any]:
        """What the level's runtime half reads from the manifest."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in PRIVATE}


@dataclass(frozen=True)
class HeadsConfig(ProgramLevel):
    """Trained heads (docs/heads.md): `heads` is their file or folder, relative to the YAML file. `window`: how many of the target's last
    hidden states are kept for a sequence, so that heads go on after a stretch in which they were off."""

    kind: str = option("eagle", choices=("medusa", "eagle"))
    heads: str = option("")
    name: str = option("heads")
    window: int = option(512, low=16, high=65536)


@dataclass(frozen=True)
class ModelConfig(ProgramLevel):
    """A smaller model with weights and pages of its own: `model` as in `target`. Its context is `context` tokens (default: what it was
    trained for); a longer one begins anew with the last half of it. `vocabulary_map`: a JSON file {draft token id: target token id} for
    tokens that the two tokenizers number differently."""

    kind: str = option("model", choices=("model",))
    model: str = option("")
    name: str = option("model")
    context: int | None = option(None, low=16, high=2**20)
    vocabulary_map: str | None = option(None)
    kv: DraftKvConfig = option(DraftKvConfig(), parse=kv_section)

    def params(self) -> dict[str, Any]:
        """With its cache's format and window."""
        return {**super().params(), **self.kv.params()}


@dataclass(frozen=True)
class SelfConfig(ProgramLevel):
    """The target's first `layers` layers, over its own cache. `exit`: a trained exit (`mlsdc train --level heads --kind exit`), relative to
    the YAML file; without one the target's own last norm and head stand there, which guess badly. `kv: high`: of the target's int8n cache
    it reads the high nibbles alone."""

    kind: str = option("self", choices=("self",))
    layers: int = option(1, low=1, high=1000)
    kv: str | None = option(None, choices=("high",))
    exit: str | None = option(None)
    name: str = option("self")

    def params(self) -> dict[str, Any]:
        """With what it reads of the target's cache."""
        return {**super().params(), **({} if self.kv is None else {"kv_coarse": True})}
