"""Compile a model.yaml into one artifact: a folder that `mlsdc run` and the runtime open.

The artifact appears whole or not at all: it is written beside -o and renamed into place. What was compiled before from the same bytes is
copied from the cache (`$XDG_CACHE_HOME/mlsdc`), unless graphs or times are asked for. MLSDC_LOG=info or debug says more.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from mlsdc.compiler.log import LoggedProgress, log_level
from mlsdc.compiler.progress import Progress, progress

if TYPE_CHECKING:
    from mlsdc.compiler.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="model.yaml", type=Path)
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, help="the artifact's folder (default: the file's name with .mlsdc)")
    parser.add_argument("--target", metavar="NAME,..", help="machines to compile for, instead of `hardware` (see `mlsdc targets`)")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="change one key, e.g. limits.max_num_seqs=16")
    parser.add_argument("--dump-ir", metavar="DIR", type=Path, help="write the graphs after every pass")
    parser.add_argument("--verify-each", action="store_true", help="execute every pass's result and compare it with what it replaced")
    parser.add_argument("--timing", action="store_true", help="print the seconds of every stage, pass and kernel (kernels compile twice)")
    parser.add_argument("--no-cache", action="store_true", help="compile, whatever was compiled before")


def main(args: argparse.Namespace) -> int:
    from mlsdc.compiler.config import load_config
    from mlsdc.compiler.timing import Timing

    output = Path(args.output or args.config.with_suffix(".mlsdc").name)
    config = load_config(args.config, [*args.set, *([f"hardware={args.target}"] if args.target else [])])
    with shown_progress() as shown:
        watched = args.dump_ir or args.verify_each or args.timing
        key = "" if args.no_cache or watched else cached_key(config)
        if key and fetched(key, output):
            return 0
        from mlsdc.compiler.driver import compile_model

        timing = Timing(shown) if args.timing else None
        with timing or nullcontext():
            compile_model(config, output, dump_ir=args.dump_ir, verify_each=args.verify_each, progress=timing or shown)
        if key:
            from mlsdc.compiler.cache import store

            store(key, output)
    for line in timing.report() if timing else ():
        print(line)
    return 0


def compile_or_fetch(config: Config, output: Path) -> None:
    """The artifact of a config at `output`, from the cache if it is there. Raises MlsdcError."""
    with shown_progress() as shown:
        key = cached_key(config)
        if key and fetched(key, output):
            return
        from mlsdc.compiler.cache import store
        from mlsdc.compiler.driver import compile_model

        compile_model(config, output, progress=shown)
        if key:
            store(key, output)


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Lines if MLSDC_LOG asks for them, else what a terminal shows."""
    level = log_level()
    if not level:
        with progress() as shown:
            yield shown
        return
    lines = LoggedProgress(level)
    try:
        yield lines
    finally:
        lines.close()


def cached_key(config: Config) -> str:
    """The cache's key, "" where there can be none; what is wrong with the config is the compile's to say."""
    from mlsdc.compiler.cache import cache_key
    from mlsdc.runtime.errors import MlsdcError
    from mlsdc.targets import target_names

    try:
        return cache_key(config, ",".join(target_names(config.hardware)))
    except (MlsdcError, OSError):
        return ""


def fetched(key: str, output: Path) -> bool:
    from mlsdc.compiler.cache import fetch

    found = fetch(key, output)
    if log_level():
        LoggedProgress(log_level()).say(f"{output.name}: from the cache ({key[:12]})" if found else f"not in the cache ({key[:12]})")
    return found
