"""List what can be compiled for; --kv prints which cache formats run where, --kernels what the GPU kernels take, as recorded here."""

from __future__ import annotations

import argparse

from mlsdc.runtime.errors import MlsdcError
from mlsdc.targets import TARGETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv", action="store_true", help="which cache formats run on which kind of target, by head_dim")
    parser.add_argument("--kernels", action="store_true",
                        help="registers and shared memory of the kernels of SmolLM2 and of an 8B shape, by architecture, as recorded")
    parser.add_argument("--compile", metavar="ARCHS",
                        help="compile them again where their text has changed, e.g. sm_80,sm_90 (an hour for all), into the record")


def main(args: argparse.Namespace) -> int:
    if args.kv:
        from mlsdc.targets.kv_support import matrix

        print("\n".join(matrix()))
        return 0
    if args.compile:
        from mlsdc.compiler.cli_targets_compile import compile_into_table

        names = args.compile.split(",")
        if wrong := [name for name in names if not name.removeprefix("sm_").isdecimal()]:
            raise MlsdcError(f"--compile: '{wrong[0]}', expected architectures like sm_90")
        for line in compile_into_table([int(name.removeprefix("sm_")) for name in names]):
            print(line, flush=True)
    if args.kernels:
        from mlsdc.targets.kernel_table import read_table, summary

        print("\n".join(summary(read_table())))
    if args.kernels or args.compile:
        return 0
    for name, entry in TARGETS.items():
        kind = "artifacts" if entry.artifact else "kernels  "
        print(f"{name:20}  {kind}  mlsdc[{entry.extra}]".ljust(50) + entry.summary)
    return 0
