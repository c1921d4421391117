"""Run passes on a module or graph given as text (`--dump-ir`, `inspect --graph`), and print the result.

    mlsdc opt dump/13-quantise-weights.ir fuse-attention fuse-qkv
    mlsdc opt x.ir --passes fuse-attention,fuse-qkv    # the same
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path)
    parser.add_argument("passes", nargs="*", metavar="PASS", help="in the order given (see `mlsdc passes`)")
    parser.add_argument("--passes", dest="listed", default="", metavar="PASS,PASS", help="the same as one list")


def main(args: argparse.Namespace) -> int:
    from mlsdc.compiler.driver import all_passes
    from mlsdc.compiler.graph import Graph
    from mlsdc.compiler.module import LevelModule, Module
    from mlsdc.compiler.pipeline import run_pipeline
    from mlsdc.compiler.text import parse, print_graph, print_module
    from mlsdc.runtime.errors import MlsdcError

    known = {pass_.name: pass_ for pass_ in all_passes()}
    names = [*args.passes, *(name.strip() for name in args.listed.split(",") if name.strip())]
    for name in names:
        if name not in known:
            raise MlsdcError(f"'{name}' is not a pass; passes are {', '.join(known)}")
    try:
        parsed = parse(args.file.read_text(encoding="utf-8"), str(args.file))
    except OSError as error:
        raise MlsdcError(f"{args.file}: cannot be read ({error.strerror})") from None
    alone = isinstance(parsed, Graph)
    module = Module("opt", (LevelModule("target", "model", graphs={"forward": parsed}),)) if isinstance(parsed, Graph) else parsed
    module = run_pipeline(module, [known[name] for name in names])
    print(print_graph(module.target.graphs["forward"]) if alone else print_module(module), end="")
    return 0
