"""A client of an OpenAI-compatible server that costs next to nothing: one socket a request, events as they come.

It serves benchmarks, on whose machine the server runs, too: an ordinary client would take a core from it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from mlsdc.runtime.errors import MlsdcError


@dataclass
class Answer:
    """One streamed answer; times on the monotonic clock."""

    started: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when tokens came, and how many at once
    text: str = ""
    usage: Mapping[str, Any] | None = None
    finish_reason: str | None = None

    @property
    def tokens(self) -> int:
        """As the server counts them, else the events with text."""
        counted = self.usage["completion_tokens"] if self.usage else None
        return int(counted) if counted is not None else sum(count for _, count in self.arrivals)

    @property
    def first_s(self) -> float:
        return self.arrivals[0][0] - self.started

    @property
    def total_s(self) -> float:
        return self.arrivals[-1][0] - self.started

    @property
    def per_token_s(self) -> float | None:
        """TPOT: after the first token."""
        return (self.total_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None

    def gaps_s(self) -> list[float]:
        """ITL: one for each token after the first; tokens that come at once share the time since the last ones."""
        gaps = [0.0] * (self.arrivals[0][1] - 1)
        for (before, _), (now, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            gaps += [(now - before) / count] * count
        return gaps


async def stream_chat(url: str, body: Mapping[str, Any], *, api_key: str | None = None, timeout_s: float = 600) -> Answer:
    """POST to URL/v1/chat/completions with `stream`. Raises MlsdcError for an answer that is none."""
    parts = urlsplit(url)
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
    head = (f"POST {parts.path.rstrip('/')}/v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
            f"{key}connection: close\r\ncontent-length: {len(data)}\r\n\r\n")
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=1 << 20)
            try:
                answer = Answer(time.perf_counter())
                writer.write(head.encode() + data)
                await writer.drain()
                await _read(reader, answer)
                return answer
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise MlsdcError(f"{url}: {type(error).__name__}: {error}") from None


async def _read(reader: asyncio.StreamReader, answer: Answer) -> None:
    header = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status = int(header.split(" ", 2)[1])
    chunked = "transfer-encoding: chunked" in header
    if status != 200:
        raise MlsdcError(f"HTTP {status}: {(await reader.read(2000)).decode(errors='replace')}")
    held = b""
    while True:
        if chunked:
            size = int(await reader.readuntil(b"\r\n"), 16)
            data = (await reader.readexactly(size + 2))[:-2]
        else:
            data = await reader.read(1 << 16)
        if not data:
            return
        now = time.perf_counter()
        *events, held = (held + data).split(b"\n\n")
        tokens = sum(_take(event, answer) for event in events)
        if tokens:
            answer.arrivals.append((now, tokens))


def _take(event: bytes, answer: Answer) -> int:
    """Read one event; how many tokens it stands for."""
    if not event.startswith(b"data: ") or event == b"data: [DONE]":
        return 0
    found = json.loads(event[6:])
    if "error" in found:
        raise MlsdcError(f"stream: {found['error'].get('message')}")
    answer.usage = found.get("usage") or answer.usage
    for choice in found.get("choices") or ():
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        delta = choice["delta"]
        answer.text += delta.get("content") or ""
        if "role" not in delta and "content" in delta and delta["content"] is not None:
            return 1
    return 0
