"""`mlsdc train model.yaml --level counts`: options, and the table that comes out."""

from __future__ import annotations

import argparse
from pathlib import Path

from mlsdc.compiler.errors import CompileError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--level counts")
    group.add_argument("--order", type=int, default=3, metavar="N", help="longest context counted; default 3")
    group.add_argument("--max-bytes", default="1.5MB", metavar="SIZE", help="of the file; default 1.5MB")


def main(args: argparse.Namespace) -> int:
    from mlsdc.compiler.capture import load_source
    from mlsdc.compiler.config import load_config
    from mlsdc.compiler.counts import write_counts
    from mlsdc.compiler.counts_file import source_tokenizer_id
    from mlsdc.compiler.heads.data import read_samples
    from mlsdc.compiler.heads.train_cli import open_tokenizer
    from mlsdc.compiler.schema import parse_bytes

    if not 0 <= args.order <= 8:
        raise CompileError(f"--order: {args.order}, expected 0 to 8")
    try:
        max_bytes = parse_bytes(args.max_bytes)
    except ValueError as error:
        raise CompileError(f"--max-bytes: {error}, found '{args.max_bytes}'") from None
    output, data = Path(args.output), [Path(path) for path in args.data]
    if not output.parent.is_dir():
        raise CompileError(f"-o: {output}: its folder does not exist")
    config = load_config(args.config)
    source = load_source(config.target.model, config.folder)
    names = ", ".join(path.name for path in data)
    texts = [(sample.tokens, sample.start) for sample in read_samples(data, open_tokenizer(source), 1 << 30)]
    done = write_counts(output, texts, order=args.order, vocab_size=source.vocab_size, max_bytes=max_bytes,
                        tokenizer=source_tokenizer_id(source), source=names)
    print(f"{output}: {done.tokens} tokens of {len(texts)} texts, {done.entries} entries of {done.pairs} different pairs, "
          f"{done.num_bytes} bytes")
    return 0
