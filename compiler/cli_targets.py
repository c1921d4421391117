"""List what can be compiled for; --kv prints which cache formats run where."""

from __future__ import annotations

import argparse

from mlsdc.targets import TARGETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv", action="store_true", help="which cache formats run on which kind of target, by head_dim")


def main(args: argparse.Namespace) -> int:
    if args.kv:
        from mlsdc.targets.kv_support import matrix

        print("\n".join(matrix()))
        return 0
    for name, entry in TARGETS.items():
        kind = "artifacts" if entry.artifact else "kernels  "
        print(f"{name:20}  {kind}  mlsdc[{entry.extra}]".ljust(50) + entry.summary)
    return 0
