"""Train what guesses for a model: `--level heads` (medusa, eagle) or `--level counts` (n-grams of the model's own text).

    mlsdc train model.yaml --level heads --data chat.jsonl -o heads.safetensors

The same command goes on where it was stopped (Ctrl-C). docs/heads.md says what the data looks like and what came out of it.
"""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

# level -> module with add_arguments(parser) and main(args) -> exit code
LEVELS = {
    "heads": "mlsdc.compiler.heads.train_cli",
    "counts": "mlsdc.compiler.cli_train_counts",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="model.yaml")
    parser.add_argument("--level", choices=tuple(LEVELS), required=True)
    parser.add_argument("--data", action="append", required=True, metavar="FILE", help="JSON lines, .gz or not; may be given several times")
    parser.add_argument("-o", "--output", required=True, metavar="FILE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--self-generate", type=int, metavar="N", help="learn from N tokens that the model itself says to the prompts of "
                        "--data (the first answers greedy, the others sampled at temperature 0.7), by our own engine, instead of texts")
    for level in LEVELS:
        _module(level).add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    if args.self_generate is not None:
        from mlsdc.compiler.cli_self_generate import kept_texts

        args.data = [str(kept_texts(args))]
    code: int = _module(args.level).main(args)
    return code


def _module(level: str) -> ModuleType:
    return importlib.import_module(LEVELS[level])
