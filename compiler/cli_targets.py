"""List what can be compiled for."""

from __future__ import annotations

import argparse

from mlsdc.targets import TARGETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults()


def main(args: argparse.Namespace) -> int:
    for name, entry in TARGETS.items():
        kind = "artifacts" if entry.artifact else "kernels  "
        print(f"{name:20}  {kind}  mlsdc[{entry.extra}]".ljust(50) + entry.summary)
    return 0
