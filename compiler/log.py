"""MLSDC_LOG, the ladder of verbosity: what long work says on stderr where there is no terminal to draw progress on.

    unset    nothing but errors (on a terminal: a line that shows progress)
    info     a line a stage, with its seconds; whether the cache was used
    debug    also a line a pass and a weight, as each begins
"""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

from mlsdc.runtime.errors import MlsdcError

LEVELS = ("", "info", "debug")


def log_level() -> str:
    """The value of MLSDC_LOG. Raises MlsdcError for one that is not on the ladder."""
    level = os.environ.get("MLSDC_LOG", "").lower()
    if level not in LEVELS:
        raise MlsdcError(f"MLSDC_LOG: '{level}' is not a level; levels are {', '.join(LEVELS[1:])}")
    return level


class LoggedProgress:
    """A Progress of plain lines, `mlsdc    12.3 s  passes`."""

    def __init__(self, level: str, out: TextIO | None = None) -> None:
        self.level, self.out = level, out or sys.stderr
        self.name, self.began = "", time.monotonic()

    def stage(self, name: str) -> None:
        self.close()
        self.name, self.began = name, time.monotonic()

    def step(self, done: int, total: int, what: str = "") -> None:
        if self.level == "debug":
            self.say(f"{self.name}  {done}/{total}  {what}")

    def close(self) -> None:
        if self.name:
            self.say(f"{time.monotonic() - self.began:7.2f} s  {self.name}")
        self.name = ""

    def say(self, line: str) -> None:
        print(f"mlsdc  {line}", file=self.out, flush=True)
