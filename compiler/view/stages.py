"""The stages of a compile: one module after every pass, read back from a dump folder, or the one graph of a file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mlsdc.compiler.graph import Graph
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.text import parse
from mlsdc.runtime.errors import MlsdcError


@dataclass(frozen=True)
class Stage:
    """`title` is the pass (`fuse-qkv`), `options` its arguments as text, `rules` what fired (`30 x a => b`)."""

    title: str
    options: str
    rules: tuple[str, ...]
    module: Module


def read_dump(folder: Path) -> list[Stage]:
    """The stages of a `--dump-ir` folder, in order. Raises MlsdcError if it holds none, IrError for text that does not parse."""
    files = sorted(path for path in folder.iterdir() if re.fullmatch(r"\d\d-[\w-]+\.ir", path.name))
    if not files:
        raise MlsdcError(f"{folder}: neither an artifact nor a folder of `--dump-ir` (no 00-captured.ir)")
    return [read_stage(path) for path in files]


def read_stage(path: Path) -> Stage:
    """One file of IR text; its leading comments are the pass's options and the rules that fired."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MlsdcError(f"{path}: cannot be read ({error.strerror})") from None
    head = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        head.append(line.removeprefix("//").strip())
    parsed = parse(text, path.name)
    title = re.sub(r"^\d\d-", "", path.stem)
    options = re.fullmatch(r"[\w-]+\((.*)\)", head[0]) if head else None
    rules = tuple(line for line in head[1:] if re.match(r"\d+ x ", line))
    return Stage(title, options[1] if options else "", rules, as_module(parsed, path.stem))


def as_module(parsed: Graph | Module, name: str) -> Module:
    """A graph by itself as a module of one level."""
    if isinstance(parsed, Module):
        return parsed
    return Module(name, (LevelModule("target", "model", graphs={parsed.name: parsed}),))


def read_graphs(text: str, where: str) -> dict[str, Graph]:
    """The graphs of an artifact's graph/<level>.ir, by name: they stand one after the other."""
    parts = re.split(r"(?m)^(?=graph )", text)
    graphs = [parse(part, where) for part in parts if part.strip()]
    return {graph.name: graph for graph in graphs if isinstance(graph, Graph)}
