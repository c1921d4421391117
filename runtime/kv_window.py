"""Windows with sinks: which cached positions a level still reads, and which of its pages nobody reads any more.

A row at position p sees position j iff j > p - window or j < sinks. The first tokens (*sinks*) draw much of every row's attention and hold
the softmax together when the middle is gone (StreamingLLM, arXiv 2309.17453). Keys keep the RoPE position they were written at, so
what a row reads depends on positions and tokens only (law L3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlsdc.runtime.errors import ArtifactError

LEAST = 64  # positions: a block of attention, and no page is larger
PARAM = "kv_window"  # of a level in the manifest


@dataclass(frozen=True)
class KvWindow:
    """The last `window` positions of a row, its own included, and the first `sinks`."""

    window: int
    sinks: int

    def gap(self, query: int, page_size: int) -> tuple[int, int]:
        """Pages start .. end - 1 of a sequence that no row at position `query` or later reads."""
        start = -(-self.sinks // page_size)
        return start, max(start, (query - self.window + 1) // page_size)

    def ahead(self, first: int, chunk: int, page_size: int) -> int:
        """Positions whose pages are enough to go on from `first` for ever, in chunks, if pages that fall into the gap serve again."""
        return first + chunk + self.window + (-(-self.sinks // page_size) + 2) * page_size

    def most_pages(self, context: int, chunk: int, page_size: int) -> int:
        """Pages that a sequence of `context` positions, written in chunks, takes at most."""
        return -(-min(context, self.ahead(0, chunk, page_size)) // page_size)

    def param(self) -> dict[str, int]:
        """As a level's params carry it."""
        return {"window": self.window, "sinks": self.sinks}


def window_of(params: Mapping[str, Any]) -> KvWindow | None:
    """The window that a level's params name. Raises ArtifactError for one that no compile writes."""
    raw = params.get(PARAM)
    if raw is None:
        return None
    match raw:
        case {"window": int(window), "sinks": int(sinks)} if window >= LEAST and sinks >= 1:
            return KvWindow(window, sinks)
    raise ArtifactError(f"{PARAM}: {raw!r}, expected a window of at least {LEAST} positions and a sink; compile again")


def narrower(window: int, sinks: int, other: KvWindow | None) -> tuple[int, int]:
    """(window, sinks) of an attention that sees `window` positions (0: all) and `sinks`, where only those of `other` are kept as well.

    An attention whose own window is the narrower one has no sinks: its model never had them.
    """
    if other is None or 0 < window <= other.window:
        return window, sinks
    return other.window, other.sinks
