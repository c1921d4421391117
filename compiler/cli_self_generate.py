"""Text that the model itself writes, by our own engine: what `mlsdc train --self-generate N` learns from."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsdc.compiler.errors import CompileError

if TYPE_CHECKING:
    from mlsdc.runtime.engine import Engine

Text = tuple[Sequence[int], int]  # tokens, and where the model's own begin
SAMPLED, TOP_K = 0.7, 40  # all answers but the first ones
LEAST = 16  # tokens of context that a prompt must leave


def kept_texts(args: argparse.Namespace) -> Path:
    """The file of generated text beside the output, written unless it is there: a run that goes on must learn from the same text.

    Its lines, {"tokens": [...], "start": n}, are training data like any other. Stopped while it writes, the same command goes on behind the
    last whole batch of answers. Raises CompileError, also for a file of fewer tokens.
    """
    from mlsdc.compiler.config import load_config
    from mlsdc.compiler.heads.data import num_said

    path = Path(args.output.replace("{kind}", "heads")).with_suffix(".texts.jsonl")
    if not path.parent.is_dir():
        raise CompileError(f"-o: {path.parent}: no such folder")
    if not path.exists():
        data, config = [Path(name) for name in args.data], load_config(args.config)
        partial = path.with_name(f"{path.name}.{run_key(config, data, args.seed)}.partial")
        kept = written(partial)
        if kept:
            print(f"{partial.name} is there: goes on behind {len(kept)} answers", flush=True)
        batches = self_generated(config, data, args.self_generate, args.seed, args.threads, kept)
        there, first = 0, list[list[Text]]()  # lines of whole batches that are written, and the batch behind them
        for batch in batches:
            if there + len(batch) > len(kept):
                first = [batch]
                break
            there += len(batch)
        with partial.open("ab") as file:
            file.truncate(sum(map(len, partial.read_bytes().splitlines(keepends=True)[:there])))  # a batch that was begun is written anew
            for batch in chain(first, batches):
                file.writelines(json.dumps({"tokens": list(tokens), "start": start}).encode() + b"\n" for tokens, start in batch)
                file.flush()
        os.replace(partial, path)
        return path
    said = num_said(path)
    if said < args.self_generate:
        raise CompileError(f"--self-generate: {args.self_generate}, but {path} is there, of {said} tokens: remove it for text anew")
    print(f"{path} is there and learned from: {said} tokens; remove it for text anew", flush=True)
    return path


def run_key(config: Any, data: Sequence[Path], seed: int) -> str:
    """Names what is generated: text that another model, other prompts or another seed made is not gone on from."""
    digest = hashlib.sha256(f"{config.folder} {config.target} {config.limits} {seed}".encode())
    for path in data:
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()[:12]


def written(partial: Path) -> list[Text]:
    """The texts of a file that was being written, but for a line that is not whole."""
    if not partial.is_file():
        return []
    whole = [json.loads(line) for line in partial.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("}\n")]
    return [(text["tokens"], text["start"]) for text in whole]


def self_generated(config: Any, data: Sequence[Path], num_tokens: int, seed: int, threads: int, kept: Sequence[Text] = ()
                   ) -> Iterator[list[Text]]:
    """The model's own answers to the prompts of `data`, again and again until `num_tokens` are said, in batches. `kept` are the first ones,
    of an earlier run. Raises CompileError."""
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
            yield from answers(engine, prompts, num_tokens, seed, kept)


def answers(engine: Engine, prompts: Sequence[Any], num_tokens: int, seed: int, kept: Sequence[Text] = (), at_once: int = 32,
            most: int = 256) -> Iterator[list[Text]]:
    """Every prompt greedily, then every prompt sampled, and so on: first the likeliest answer, then others, `at_once` a batch.

    As far as whole batches are among `kept`, they are taken from there. Raises CompileError.
    """
    from mlsdc.runtime.sampling_params import SamplingParams

    context = engine.manifest.limits.max_model_len
    fitting = [tokens for prompt in prompts if len(tokens := engine.tokenize(prompt)) <= context - LEAST]
    if not fitting:
        raise CompileError(f"--self-generate: every prompt is longer than {context - LEAST} tokens, of limits.max_model_len {context}")
    done = turn = there = 0
    while done < num_tokens:
        for start in range(0, len(fitting), at_once):
            batch = fitting[start : start + at_once]
            if there + len(batch) <= len(kept):
                texts = list(kept[there : there + len(batch)])
                there += len(batch)
                done += sum(len(tokens) - first for tokens, first in texts)
                yield texts
                if done >= num_tokens:
                    return
                continue
            there = len(kept)  # the rest of it is a part of this batch
            rooms = [min(most, context - len(prompt)) for prompt in batch]
            params = [SamplingParams(max_tokens=room) if turn == 0 else SamplingParams(
                max_tokens=room, temperature=SAMPLED, top_k=TOP_K, seed=seed + turn) for room in rooms]
            results = engine.generate(batch, params)
            done += sum(len(result.token_ids) for result in results)
            yield [([*result.prompt_token_ids, *result.token_ids], len(result.prompt_token_ids)) for result in results]
            print(f"{done} of {num_tokens} tokens", flush=True)
            if done >= num_tokens:
                return
        turn += 1
