"""`mlsdc train model.yaml --level counts`: options, and the table that comes out."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsdc.compiler.errors import CompileError

if TYPE_CHECKING:
    from mlsdc.runtime.engine import Engine

Text = tuple[Sequence[int], int]  # tokens, and where counting starts
SAMPLED, TOP_K = 0.7, 40  # every other answer of --self-generate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--level counts")
    group.add_argument("--order", type=int, default=3, metavar="N", help="longest context counted; default 3")
    group.add_argument("--max-bytes", default="1.5MB", metavar="SIZE", help="of the file; default 1.5MB")
    group.add_argument("--self-generate", type=int, metavar="N", help="count N tokens that the model itself says to the prompts of --data "
                       "(every other answer sampled at temperature 0.7), by our own engine, instead of texts")


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
    texts: list[Text]
    if args.self_generate is None:
        texts = [(sample.tokens, sample.start) for sample in read_samples(data, open_tokenizer(source), 1 << 30)]
    else:
        texts = list(self_generated(config, data, args.self_generate, args.seed, args.threads))
        names = f"answers to {names}"
    done = write_counts(output, texts, order=args.order, vocab_size=source.vocab_size, max_bytes=max_bytes,
                        tokenizer=source_tokenizer_id(source), source=names)
    print(f"{output}: {done.tokens} tokens of {len(texts)} texts, {done.entries} entries of {done.pairs} different pairs, "
          f"{done.num_bytes} bytes")
    return 0


def self_generated(config: Any, data: Sequence[Path], num_tokens: int, seed: int, threads: int) -> Iterator[Text]:
    """The model's own answers to the prompts of `data`, again and again until `num_tokens` are said. Raises CompileError."""
    import dataclasses
    import tempfile

    from mlsdc.compiler.cli_compile import compile_or_fetch
    from mlsdc.compiler.heads.data import read_prompts
    from mlsdc.runtime.engine import Engine

    if num_tokens < 1:
        raise CompileError(f"--self-generate: {num_tokens}, expected a number of tokens")
    prompts = read_prompts(data)
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "plain.mlsdc"
        compile_or_fetch(dataclasses.replace(config, cascade=()), artifact)
        with Engine.load(artifact, threads=threads) as engine:
            yield from answers(engine, prompts, num_tokens, seed)


def answers(engine: Engine, prompts: Sequence[Any], num_tokens: int, seed: int, at_once: int = 32, most: int = 256) -> Iterator[Text]:
    """Every prompt greedily, then every prompt sampled, and so on: first the likeliest answer, then others."""
    from mlsdc.runtime.sampling_params import SamplingParams

    done = turn = 0
    while done < num_tokens:
        for start in range(0, len(prompts), at_once):
            batch = prompts[start : start + at_once]
            params = SamplingParams(max_tokens=most) if turn == 0 else SamplingParams(
                max_tokens=most, temperature=SAMPLED, top_k=TOP_K, seed=seed + turn)
            for result in engine.generate(batch, params):
                yield [*result.prompt_token_ids, *result.token_ids], len(result.prompt_token_ids)
                done += len(result.token_ids)
            print(f"{done} of {num_tokens} tokens", flush=True)
            if done >= num_tokens:
                return
        turn += 1
