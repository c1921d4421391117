"""List the model families and checkpoint sources that are known to work, and what each was proven by.

Any other decoder that torch.export takes and the raising rules recognise compiles too; these are the ones that tests run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mlsdc.compiler.families import FAMILIES, PROOFS, SOURCES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="as docs/models.md has it")


def main(args: argparse.Namespace) -> int:
    print(markdown() if args.markdown else text())
    return 0


def text() -> str:
    """Two aligned tables and what their last column means."""
    families = [(f.name, f.model_type, ", ".join(f.proofs), f.traits) for f in FAMILIES]
    sources = [(s.name, s.proof, s.what) for s in SOURCES]
    meanings = [f"{name:6}  {meaning}" for name, meaning in PROOFS.items()]
    return "\n".join([*aligned(families), "", *aligned(sources), "", "proven by:", *(f"  {line}" for line in meanings)])


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def markdown() -> str:
    """The same as Markdown tables."""
    lines = ["| family | `model_type` | what it has | proven by |", "|---|---|---|---|"]
    lines += [f"| {f.name} | `{f.model_type}` | {f.traits} | {', '.join(f.proofs)} |" for f in FAMILIES]
    lines += ["", "| source | what of it | proven by |", "|---|---|---|"]
    lines += [f"| {s.name} | {s.what} | {s.proof} |" for s in SOURCES]
    return "\n".join([*lines, "", *(f"- **{name}**: {meaning}." for name, meaning in PROOFS.items())])
