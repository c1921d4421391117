"""Compile a model.yaml into one artifact: a folder that `mlsdc run` and the runtime open.

The artifact appears whole or not at all: it is written beside -o and renamed into place.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mlsdc.compiler.progress import progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="model.yaml", type=Path)
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, help="the artifact's folder (default: the file's name with .mlsdc)")
    parser.add_argument("--target", metavar="NAME", help="machine to compile for, instead of the file's `hardware` (see `mlsdc targets`)")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="change one key, e.g. limits.max_num_seqs=16")
    parser.add_argument("--dump-ir", metavar="DIR", type=Path, help="write the graphs after every pass")
    parser.add_argument("--verify-each", action="store_true", help="execute every pass's result and compare it with what it replaced")


def main(args: argparse.Namespace) -> int:
    from mlsdc.compiler.driver import compile_model

    output = args.output or args.config.with_suffix(".mlsdc").name
    overrides = [*args.set, *([f"hardware={args.target}"] if args.target else [])]
    with progress() as shown:
        compile_model(args.config, output, set=overrides, dump_ir=args.dump_ir, verify_each=args.verify_each, progress=shown)
    return 0
