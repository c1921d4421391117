"""Where a compile's seconds go: stages and passes through the progress reports, kernels through `timed`, free when nobody looks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mlsdc.compiler.progress import Progress

_seconds: ContextVar[dict[str, float] | None] = ContextVar("seconds", default=None)


def recording() -> bool:
    """Whether somebody wants to know: work may then measure what it otherwise would not."""
    return _seconds.get() is not None


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Add the block's seconds to `name`, if a Timing is open."""
    seconds = _seconds.get()
    if seconds is None:
        yield
        return
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began


class Timing:
    """A Progress that passes reports on to another one and adds up seconds: `stages`, `passes`, `kernels`, each name -> seconds, in order.

    Use it in `with`, so that `timed` blocks reach it.
    """

    def __init__(self, shown: Progress) -> None:
        self.shown = shown
        self.stages: dict[str, float] = {}
        self.passes: dict[str, float] = {}
        self.kernels: dict[str, float] = {}
        self._stage = self._pass = ""
        self._stage_began = self._pass_began = time.perf_counter()

    def __enter__(self) -> Timing:
        self._token = _seconds.set(self.kernels)
        return self

    def __exit__(self, *error: object) -> None:
        _seconds.reset(self._token)
        self._close()

    def stage(self, name: str) -> None:
        self._close()
        self._stage, self._stage_began = name, time.perf_counter()
        self.shown.stage(name)

    def step(self, done: int, total: int, what: str = "") -> None:
        if self._stage == "passes":  # reported before each pass
            self._close_pass()
            self._pass, self._pass_began = what, time.perf_counter()
        self.shown.step(done, total, what)

    def _close(self) -> None:
        self._close_pass()
        if self._stage:
            self.stages[self._stage] = self.stages.get(self._stage, 0.0) + time.perf_counter() - self._stage_began
        self._stage = ""

    def _close_pass(self) -> None:
        if self._pass:
            self.passes[self._pass] = self.passes.get(self._pass, 0.0) + time.perf_counter() - self._pass_began
        self._pass = ""

    def report(self) -> Iterator[str]:
        """Lines for people: stages and passes in order, kernels the slowest first: template, parsing, and LLVM on it alone."""
        total = sum(self.stages.values())
        for name, seconds in self.stages.items():
            yield f"{seconds:8.2f} s  {name}"
            if name == "passes":
                yield from (f"{of:8.2f} s    {pass_}" for pass_, of in self.passes.items())
            if name == "kernels":
                yield from (f"{of:8.2f} s    {key}" for key, of in sorted(self.kernels.items(), key=lambda pair: -pair[1]))
        yield f"{total:8.2f} s  in all"
