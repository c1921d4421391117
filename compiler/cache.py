"""Artifacts that were compiled before, found by the content of everything they depend on: a compile in which nothing changed is a copy.

The key hashes mlsdc's own code and templates, the tools' versions, the target, the config and every byte of the files it names. Entries are
whole artifacts in `$XDG_CACHE_HOME/mlsdc` (else `~/.cache/mlsdc`), renamed into place when they are whole, so any number of processes may
use one cache. Nothing here fails a compile: a cache that cannot be read or written is as good as none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mlsdc.compiler.capture.resolve import PACKAGE, package_file
from mlsdc.compiler.config import Config
from mlsdc.compiler.pack import staged
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.errors import MlsdcError

KEPT = 6  # artifacts, the least recently used go first
CODE = ("*.py", "*.jinja", "*.ll")
TOOLS = ("apache-tvm", "torch", "transformers", "triton", "numpy", "gguf")


def cache_folder() -> Path | None:
    """Where entries live; None if there is no home to put them in."""
    base = os.environ.get("XDG_CACHE_HOME") or (os.path.expanduser("~/.cache") if os.path.expanduser("~") != "~" else "")
    return Path(base) / "mlsdc" if os.path.isabs(base) else None


def cache_key(config: Config, hardware: str) -> str:
    """sha256 of everything the artifact depends on. `hardware` are the targets' own names, not `cpu-native`. Raises MlsdcError, OSError."""
    digest = hashlib.sha256()
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name not in ("folder", "where")}
    for part in (hardware, platform.python_version(), *map(tool, TOOLS), repr(sorted(values.items()))):
        digest.update(part.encode() + b"\0")
    root = Path(__file__).resolve().parent.parent
    for portion in ("compiler", "passes", "runtime", "targets", "templates"):
        for path in sorted(path for pattern in CODE for path in (root / portion).rglob(pattern)):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    for path in sorted(set(named_files(values, config.folder))):
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def tool(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} none"


def named_files(value: Any, folder: Path | None) -> Iterator[Path]:
    """Every file that a string anywhere in the config names: the model, drafts, texts; all files of a folder."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value) if hasattr(value, "__dict__") else dataclasses.asdict(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from named_files(part, folder)
    elif isinstance(value, str | Path) and str(value):
        package = str(value).startswith(PACKAGE)
        path = package_file(str(value).removeprefix(PACKAGE)) if package else (folder or Path()) / Path(value).expanduser()
        if path.is_file():
            yield path
        elif (path / "config.json").is_file():
            yield from (file for file in path.rglob("*") if file.is_file())


def fetch(key: str, output: Path) -> bool:
    """Make the entry the artifact at `output`, every byte checked. False, and `output` is what it was, if there is none that is whole."""
    folder = cache_folder()
    entry = folder / key if folder else None
    if entry is None or not (entry / "manifest.json").is_file():
        return False
    try:
        with staged(output) as partial:
            try:
                shutil.copytree(entry, partial, dirs_exist_ok=True)
                Artifact.open(partial).verify()
            except (OSError, shutil.Error, MlsdcError):
                raise Spoiled from None
    except Spoiled:
        shutil.rmtree(entry, ignore_errors=True)
        return False
    with contextlib.suppress(OSError):  # a read-only cache serves, too
        os.utime(entry)
    return True


class Spoiled(Exception):
    """An entry that is not whole: another process is removing it, or somebody changed it."""


def store(key: str, artifact: Path) -> None:
    """Keep a copy of the artifact, and at most KEPT entries. Does nothing where it cannot."""
    folder = cache_folder()
    if folder is None:
        return
    partial = folder / f".{key[:16]}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(artifact, partial)
        partial.rename(folder / key)
        entries = sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.stat().st_mtime)
        for old in entries[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    except (OSError, shutil.Error):
        pass  # read-only, full, or another process was first: its entry has the same bytes
    finally:
        shutil.rmtree(partial, ignore_errors=True)
