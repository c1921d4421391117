"""What a target step costs: seconds by rows and context, from `mlsdc tune` or a shipped default, corrected by the steps that are run.

A step's time is piecewise linear in its rows at each measured context, linear between contexts and beyond them. The correction is one
factor for each range of rows (a moving average of measured / predicted), so that a table of another machine, or a machine that slows
down, changes what is chosen after some dozen steps. Nothing here reads a clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from mlsdc.runtime.step import Array, aligned

SHARE = 0.05  # of a new measurement in a correction
BOUND = 2.0  # a measurement further off than this factor counts as that far off: the machine did something else, too
TRIED, STALE = 3, 400  # steps until a range of rows counts as known, and as long not seen
RANGES = 16
ROUND = 128  # contexts are priced in steps of it


@dataclass(frozen=True)
class CostTable:
    """`seconds[i][j]`: a step of `rows[j]` rows after `contexts[i]` tokens a sequence. `draft_s`: level -> seconds a request's draft."""

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    draft_s: Mapping[str, float]

    def lines(self, rows: int, context: int) -> Array:
        """`step_s` of 0 (as of 1), 1, … `rows` rows, f64: the same numbers."""
        counts = np.maximum(np.arange(rows + 1, dtype=np.float64), 1.0)
        by_context = [_points(self.rows, line, counts) for line in self.seconds]
        if len(by_context) == 1:
            return by_context[0]
        i = _piece(self.contexts, context)
        low, high = by_context[i], by_context[i + 1]
        return np.maximum(1e-9, low + (context - self.contexts[i]) * (high - low) / (self.contexts[i + 1] - self.contexts[i]))

    def step_s(self, rows: int, context: int) -> float:
        """Seconds of a step, without correction."""
        by_context = [_line(self.rows, line, rows) for line in self.seconds]
        return max(1e-9, _line(self.contexts, by_context, context)) if len(by_context) > 1 else by_context[0]


# By hand, after bench runs of examples/smollm2.yaml (int8, bf16 cache) on two Zen 4 cores: taken for a CPU before anything is measured
DEFAULT = CostTable(
    (256, 1024), (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 32),
    ((4.4e-3, 4.45e-3, 4.8e-3, 5.2e-3, 6.1e-3, 7.0e-3, 8.8e-3, 10.2e-3, 12.4e-3, 13.4e-3, 23.0e-3),
     (5.0e-3, 5.2e-3, 5.8e-3, 6.5e-3, 8.0e-3, 9.4e-3, 11.4e-3, 13.6e-3, 17.0e-3, 18.2e-3, 31.0e-3)),
    {})


@cache
def _range(rows: int) -> int:
    """Steps that share a correction: of 1, 2, 3-4, 5-8, 9-12, 13-16, 17-24, 25-32, then twice as many each."""
    if rows <= 2:
        return rows
    return min(2 + (rows - 1).bit_length() - 1, 4) if rows <= 8 else min(4 + (rows - 5) // 4, 7) if rows <= 16 else (
        8 + (rows > 24) if rows <= 32 else min(4 + (rows - 1).bit_length(), RANGES - 1))


def _line(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """Through the points, on the last two lines beyond them."""
    if len(xs) == 1:
        return ys[0]
    i = _piece(xs, x)
    return ys[i] + (x - xs[i]) * (ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i])


def _piece(xs: Sequence[int], x: float) -> int:
    return min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)


def _points(xs: Sequence[int], ys: Sequence[float], at: Array) -> Array:
    """`_line` of many places at once."""
    if len(xs) == 1:
        return np.full(len(at), ys[0])
    x, y = np.array(xs, np.float64), np.array(ys, np.float64)
    i = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(xs) - 2)
    found: Array = y[i] + (at - x[i]) * (y[i + 1] - y[i]) / (x[i + 1] - x[i])
    return found


class Costs:
    """A table and its corrections."""

    def __init__(self, table: CostTable = DEFAULT) -> None:
        self.table = table
        self._factors: list[float] = [1.0] * RANGES
        self._seen = [0] * RANGES
        self._last = [0] * RANGES  # the step that last had so many rows
        self.scale = 1.0  # of ranges that were never seen
        self._steps = 0
        self._cache: dict[int, list[float]] = {}  # context -> uncorrected seconds by rows
        self._lines: dict[int, Array] = {}  # the same as arrays
        self.words = aligned((2 * RANGES,), "f8")  # for native code: corrections, and how often each was seen
        self.words[:RANGES] = 1.0
        self._view: memoryview[Any] = memoryview(self.words)  # type: ignore[arg-type]

    def step_s(self, rows: int, context: int) -> float:
        """Seconds of a step of `rows` rows, after `context` tokens a sequence in the mean."""
        return self._raw(rows, context) * self._factor(rows)

    def line(self, rows: int, more: int, context: int) -> list[float]:
        """`step_s` of `rows`, `rows` + 1, … `rows` + `more` rows: a choice looks at all of them, every step."""
        self._raw(rows + more, context)
        raw = self._cache[context // ROUND]
        factors = [self._factor_of(i) for i in range(RANGES)]
        return [raw[r] * factors[_range(r)] for r in range(rows, rows + more + 1)]

    def stale(self, rows: int) -> bool:
        """Whether steps of so many rows should be tried: there were hardly any, or none for long."""
        i = _range(rows)
        return self._seen[i] < TRIED or self._steps - self._last[i] >= STALE

    def learn(self, rows: int, context: int, seconds: float) -> None:
        """A step was run."""
        if rows < 1:
            return
        ratio = seconds / self._raw(rows, context)
        self._steps += 1
        i = _range(rows)
        if self._seen[i] >= TRIED:
            ratio = min(max(ratio, self._factors[i] / BOUND), self._factors[i] * BOUND)
        self.scale += (ratio - self.scale) * max(SHARE, 1 / self._steps)
        self._seen[i] += 1
        self._last[i] = self._steps
        self._factors[i] += (ratio - self._factors[i]) * max(SHARE, 1 / self._seen[i])
        self._view[i], self._view[RANGES + i] = self._factors[i], self._seen[i]

    def _factor(self, rows: int) -> float:
        return self._factor_of(_range(rows))

    def _factor_of(self, i: int) -> float:
        """Of a range of rows, as far as it is known, else the scale of all."""
        weight = min(1.0, self._seen[i] / TRIED)
        return weight * self._factors[i] + (1 - weight) * self.scale

    def _raw(self, rows: int, context: int) -> float:
        key = context // ROUND
        line = self._cache.get(key)
        if line is None or len(line) <= rows:
            line = self._cache[key] = self.raw(context, rows).tolist()
        return line[rows]

    def raw(self, context: int, rows: int) -> Array:
        """Uncorrected seconds of steps of 0, 1, … `rows` rows and more: f64, the same array until more rows are asked for."""
        key = context // ROUND
        line = self._lines.get(key)
        if line is None or len(line) <= rows:
            found = self.table.lines(max(64, 2 * rows), key * ROUND + ROUND // 2)
            line = self._lines[key] = aligned(found.shape, "f8")
            line[:] = found
        return line


def ranges(rows: int) -> Array:
    """i32: of steps of 0, 1, … `rows` rows, the range whose correction they share."""
    found = aligned((rows + 1,), "i4")
    found[:] = [_range(count) for count in range(rows + 1)]
    return found
