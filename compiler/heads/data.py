"""Training text: JSON lines of texts or chats, plain or gzipped, as token sequences that say which tokens the target wrote.

A record is one of
    {"text": "..."}                              every token counts
    {"messages": [...]}                          the assistant's last turn counts; without one the record is a prompt
    {"id": ..., "text" or "tokens": ...}         the completion of the prompt record of the same id
    {"tokens": [...], "start": n}                tokens, of which those from n on count (what `--self-generate` keeps)
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlsdc.compiler.errors import HeadError
from mlsdc.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sample:
    """`tokens[start:]` is the target's own text."""

    tokens: tuple[int, ...]
    start: int


def read_samples(paths: Sequence[Path], tokenizer: Tokenizer, max_tokens: int) -> list[Sample]:
    """All samples of the files, cut to `max_tokens`. Raises HeadError for a file or a line that is not such data."""
    records = [(where, record) for path in paths for where, record in _records(path)]
    prompts = {record["id"]: record["messages"] for _, record in records if "id" in record and _is_prompt(record)}
    samples = []
    for where, record in records:
        try:
            sample = _sample(record, prompts, tokenizer)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise HeadError(f"{where}: not a training record ({type(error).__name__}: {error})") from None
        if sample is not None and sample.start < max_tokens - 2 and len(sample.tokens) - sample.start > 2:
            samples.append(Sample(sample.tokens[:max_tokens], sample.start))
    if not samples:
        raise HeadError(f"{', '.join(path.name for path in paths)}: no text to learn from; expected lines such as {{\"text\": \"...\"}}")
    return samples


def read_prompts(paths: Sequence[Path]) -> list[Any]:
    """Chats that end with somebody else's turn: what a model is asked. Raises HeadError if there are none."""
    prompts = [record["messages"] for path in paths for _, record in _records(path) if _is_prompt(record)]
    if not prompts:
        raise HeadError(f"{', '.join(path.name for path in paths)}: no prompts; expected lines such as "
                        '{"messages": [{"role": "user", "content": "..."}]}')
    return prompts


def num_said(path: Path) -> int:
    """Tokens that count in a file of `--self-generate`. Raises HeadError for a line that is not one of its."""
    total = 0
    for where, record in _records(path):
        try:
            total += len(record["tokens"]) - int(record["start"])
        except (TypeError, ValueError, KeyError) as error:
            raise HeadError(f"{where}: not a record of --self-generate ({type(error).__name__}: {error})") from None
    return total


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with (gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path.name}: line {number}"
                try:
                    record = json.loads(line)
                except ValueError:
                    raise HeadError(f"{where}: not JSON") from None
                if not isinstance(record, dict):
                    raise HeadError(f"{where}: expected an object, found {type(record).__name__}")
                yield where, record
    except (OSError, UnicodeDecodeError) as error:
        raise HeadError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _is_prompt(record: dict[str, Any]) -> bool:
    messages = record.get("messages")
    return isinstance(messages, list) and bool(messages) and isinstance(messages[-1], dict) and messages[-1].get("role") != "assistant"


def _sample(record: dict[str, Any], prompts: dict[Any, Any], tokenizer: Tokenizer) -> Sample | None:
    if "messages" in record:
        if _is_prompt(record):
            return None
        *before, answer = record["messages"]
        return _joined(tokenizer, before, tokenizer.encode(answer["content"], add_special_tokens=False))
    if "start" in record:
        return Sample(tuple(int(token) for token in record["tokens"]), int(record["start"]))
    if record.get("id") in prompts:
        written = record.get("tokens")
        tokens = tokenizer.encode(record["text"], add_special_tokens=False) if written is None else [int(token) for token in written]
        return _joined(tokenizer, prompts[record["id"]], tokens)
    if "id" in record or "text" not in record:
        return None  # the completion of a prompt that was not given
    return Sample(tuple(tokenizer.encode(record["text"])), 0)


def _joined(tokenizer: Tokenizer, messages: Sequence[Any], answer: Sequence[int]) -> Sample:
    prompt = tokenizer.chat(messages)
    return Sample((*prompt, *answer), len(prompt))
