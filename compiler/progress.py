"""Progress of long work: one line that is rewritten on a terminal, nothing at all in a pipe or a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from mlsdc.compiler.pipeline import Observer, Pass

if TYPE_CHECKING:
    from mlsdc.compiler.module import Module


class Progress(Protocol):
    """What long work reports to. Both calls are cheap: work reports as often as it likes."""

    def stage(self, name: str) -> None:
        """A new stage begins: `capture`, `passes`, `kernels`, `weights`."""

    def step(self, done: int, total: int, what: str = "") -> None:
        """`done` of `total` units of the stage are finished; `what` names the one just done."""


class Silent:
    """For libraries and tests: reports nothing."""

    def stage(self, name: str) -> None:
        return None

    def step(self, done: int, total: int, what: str = "") -> None:
        return None


class Terminal:
    """`  3.1 s  weights  142/273  layers.15.mlp.down`, at most ten times a second; stages leave a line with their time behind."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.name = ""
        self.started = self.shown = 0.0

    def stage(self, name: str) -> None:
        self.close()
        self.name, self.started, self.shown = name, time.monotonic(), 0.0
        self._show(f"{'':8}  {name}")

    def step(self, done: int, total: int, what: str = "") -> None:
        now = time.monotonic()
        if now - self.shown < 0.1:
            return
        self.shown = now
        self._show(f"{now - self.started:6.1f} s  {self.name}  {done}/{total}  {what}")

    def close(self) -> None:
        """End the current stage's line, with how long it took."""
        if self.name:
            self._show(f"{time.monotonic() - self.started:6.1f} s  {self.name}")
            self.out.write("\n")
            self.name = ""

    def _show(self, line: str) -> None:
        self.out.write(f"\r\x1b[K{line[:100]}")
        self.out.flush()


@contextmanager
def progress(out: TextIO | None = None) -> Iterator[Progress]:
    """A Terminal if `out` (stderr) is one, else Silent."""
    out = out or sys.stderr
    if not out.isatty():
        yield Silent()
        return
    terminal = Terminal(out)
    try:
        yield terminal
    finally:
        terminal.close()


class PassProgress(Observer):
    """Tells a Progress which pass runs."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress = progress
        self.total = total

    def before(self, index: int, pass_: Pass, module: Module) -> None:
        self.progress.step(index, self.total, pass_.name)
