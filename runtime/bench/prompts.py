"""Prompts for measuring: JSON lines, plain or gzipped, a chat or a text each, with a kind."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from mlsdc.runtime.errors import MlsdcError

Text = Union[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class BenchPrompt:
    """`kind` is the record's `group`, else its `kind`, else `all`."""

    kind: str
    prompt: Text


def read_prompts(path: Path, per_kind: int | None = None) -> list[BenchPrompt]:
    """Records {"messages": [...]} or {"prompt": "..."}; at most `per_kind` of each kind, the first ones. Raises MlsdcError."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise MlsdcError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    found: list[BenchPrompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        prompt = _prompt(f"{path.name}: line {number}", line)
        seen[prompt.kind] = seen.get(prompt.kind, 0) + 1
        if per_kind is None or seen[prompt.kind] <= per_kind:
            found.append(prompt)
    if not found:
        raise MlsdcError(f'{path}: no prompt in it; expected JSON lines such as {{"messages": [{{"role": "user", "content": "..."}}]}}')
    return found


def _prompt(where: str, line: str) -> BenchPrompt:
    try:
        record = json.loads(line)
    except ValueError:
        raise MlsdcError(f"{where}: not JSON") from None
    prompt = record.get("messages", record.get("prompt")) if isinstance(record, dict) else None
    if not prompt or not isinstance(prompt, str | list):
        raise MlsdcError(f'{where}: expected "messages" or "prompt", found {line.strip()[:60]}')
    return BenchPrompt(str(record.get("group") or record.get("kind") or "all"), prompt)
