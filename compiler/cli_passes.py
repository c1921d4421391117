"""List the passes of the default pipeline, in order. `passes: {disable: [NAME]}` in model.yaml leaves one out."""

from __future__ import annotations

import argparse
import inspect
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="show this pass's whole description: before -> after, and when it declines")


def main(args: argparse.Namespace) -> int:
    from mlsdc.compiler.driver import all_passes
    from mlsdc.runtime.errors import MlsdcError

    passes = {pass_.name: type(pass_) for pass_ in all_passes()}
    if args.name is None:
        for index, (name, cls) in enumerate(passes.items(), 1):
            print(f"{index:2}  {name:20}  {summary(name, cls)}")
        return 0
    if args.name not in passes:
        raise MlsdcError(f"'{args.name}' is not a pass; passes are {', '.join(passes)}")
    print(inspect.getdoc(passes[args.name]))
    return 0


def summary(name: str, cls: type) -> str:
    """The first line of the pass's file."""
    return (inspect.getdoc(sys.modules[cls.__module__]) or "").partition("\n")[0].removeprefix(f"{name}: ")
