"""What the status page shows: figures of now and of the last minutes, as plain numbers."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from mlsdc.runtime.statistics import Statistics

if TYPE_CHECKING:
    from mlsdc.runtime.kv_pool import KvPool
    from mlsdc.runtime.pages import Pages
    from mlsdc.runtime.server.state import Server

WINDOW_S = 60.0
MAX_SAMPLES = 20_000
MAX_SHOWN = 50


class Recent:
    """Times and values of the last minute, the newest last."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)

    def add(self, value: float) -> None:
        self._samples.append((time.monotonic(), value))

    def values(self) -> list[float]:
        start = time.monotonic() - WINDOW_S
        while self._samples and self._samples[0][0] < start:
            self._samples.popleft()
        return sorted(value for _, value in self._samples)


def quantile(values: list[float], share: float) -> float | None:
    """Of sorted values: the smallest that at least `share` of them do not exceed."""
    return values[min(len(values) - 1, max(0, -int(-share * len(values) // 1) - 1))] if values else None


def overview(server: Server) -> dict[str, Any]:
    """/status.json. No text of any request is in it."""
    engine = server.engine.engine
    scheduler, pool, metrics = engine.scheduler, engine.pool, server.metrics
    running = list(scheduler.running)
    total = Statistics()
    total.merge(engine.statistics)
    for request in running:
        total.merge(request.statistics)
    now = time.perf_counter()
    ttft, itl = metrics.recent_ttft.values(), metrics.recent_itl.values()
    return {
        "model": server.model, "fingerprint": server.fingerprint, "uptime_s": round(time.time() - server.created),
        "state": server.health() or ("shutting down" if server.draining else "ready"),
        "tokens_total": metrics.tokens_seen, "tokens_per_s": round(len(itl) / WINDOW_S, 2), "clock": round(now, 3),
        "running": len(running), "waiting": len(scheduler.waiting), "max_running": scheduler.max_running,
        "ttft_ms": {"p50": _ms(quantile(ttft, 0.5)), "p99": _ms(quantile(ttft, 0.99))},
        "itl_ms": {"p50": _ms(quantile(itl, 0.5)), "p99": _ms(quantile(itl, 0.99))},
        "acceptance_length": round(total.acceptance_length, 3),
        "levels": {
            name: {"drafted": level.drafted, "accepted": level.accepted, "rate": round(level.acceptance_rate, 4),
                   "by_position": [{"offered": d.offered, "rate": round(d.rate, 4)} for d in level.depths]}
            for name, level in list(total.levels.items())
        },
        "kv": [*_kv("target", pool), *(kind for level in engine.drafting.levels for kind in _kv(level.name, getattr(level, "pool", None)))],
        "requests": [
            {"id": request.id, "prompt": request.num_prompt, "output": request.num_output, "pages": len(request.table.pages),
             "age_s": round(now - request.timings.submitted, 2), "steps": request.statistics.steps,
             "acceptance_length": round(request.statistics.acceptance_length, 2), "state": "decoding" if request.decoding else "prompt"}
            for request in running[:MAX_SHOWN]
        ],
    }


def _kv(level: str, pool: KvPool | None) -> list[dict[str, Any]]:
    """A level's pages, and the 16-bit ones beside them if its format is a grouped one. What other levels hold counts as used."""
    if pool is None:
        return []
    kinds: list[tuple[str, Pages, int]] = [(level, pool, pool.page_size)]
    if pool.wide is not None:
        kinds.append((f"{level} tail", pool.wide, pool.wide.tail.page_size))
    return [{"level": name, "pages": kind.num_pages, "used": kind.num_pages - kind.num_available, "page_size": size}
            for name, kind, size in kinds]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 2)
