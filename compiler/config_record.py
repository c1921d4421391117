"""The model.yaml that an artifact remembers: `config.json`, every default spelled out, so that `mlsdc eval` can compile its siblings.

Paths of the machine that compiled are not kept (law L6): a model that came from a file is named by its own name, and whoever compiles it
again says where it lies.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mlsdc.compiler.capture.resolve import EVERYWHERE
from mlsdc.compiler.config import Config, parse_config
from mlsdc.compiler.errors import CompileError
from mlsdc.runtime.artifact import Artifact

NAME = "config.json"
PATHS = ("model", "counts", "heads", "text")  # keys whose values are files or folders of the machine that compiled


def config_json(config: Config, label: str) -> str:
    """The config as text; `label` is the source's name for itself (`package:...`, or a file's own name)."""
    raw = named(dataclasses.asdict(config))
    for private in ("where", "folder"):
        del raw[private]
    raw["target"]["model"] = label
    return json.dumps(raw, indent=1, sort_keys=True) + "\n"


def named(value: Any) -> Any:
    """The same with every path to a file or folder replaced by its last part."""
    if isinstance(value, dict):
        return {key: Path(part).name if key in PATHS and part and not part.startswith(EVERYWHERE) else named(part)
                for key, part in value.items()}
    return [named(part) for part in value] if isinstance(value, list | tuple) else value


def read_record(artifact: Artifact, *, model: str | None = None, changes: dict[str, Any] | None = None, cascade: bool = True) -> Config:
    """The config an artifact was compiled from. `model` says where its checkpoint lies, `changes` replace keys of `target`.

    Without `cascade`: of the target alone, whose figures the levels below never change, and without a gate.

    Raises CompileError for an artifact without one, or whose model cannot be found without `model`; ConfigError for bad changes.
    """
    where = f"{artifact.root.name}/{NAME}"
    if NAME not in artifact.manifest.files:
        raise CompileError(f"{where}: missing: the artifact is of an older version; compile it again")
    raw = json.loads(artifact.path(NAME).read_text(encoding="utf-8"))
    label = raw["target"]["model"]
    if model is None and not label.startswith(EVERYWHERE):
        raise CompileError(f"{where}: the model was the file or folder '{label}': say where it lies with --model PATH")
    raw["target"] |= {"model": model or label, **(changes or {})}
    if not cascade:
        raw["cascade"], raw["quality_gate"] = [], None
    return parse_config(raw, where, Path("."))
