"""Check every byte of an artifact against its manifest (opening it checks all but the weights' contents)."""

from __future__ import annotations

import argparse

from mlsdc.runtime.artifact import Artifact


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact")


def main(args: argparse.Namespace) -> int:
    artifact = Artifact.open(args.artifact)
    names = artifact.verify()
    total = sum(artifact.path(name).stat().st_size for name in names)
    print(f"{artifact.root.name}: {len(names)} files, {total} bytes, all as packed")
    return 0
