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
FIRST_BOUND = 1.25  # the same of the first ones of a range of rows, beside what other ranges say
FORGET = 0.005  # of what drafted steps cost more, a plain step
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


# The target's program of examples/smollm2.yaml (int8, bf16 cache) on two Zen 4 cores, 30.11.2026: medians of three runs of 5 rounds, 32
# rows by hand. Taken for a CPU before anything is measured
DEFAULT = CostTable(
    (256, 1024), (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 32),
    ((4.2e-3, 4.2e-3, 4.3e-3, 4.4e-3, 5.2e-3, 5.9e-3, 7.3e-3, 8.7e-3, 11.0e-3, 12.1e-3, 21.5e-3),
     (5.0e-3, 5.4e-3, 5.8e-3, 6.2e-3, 7.4e-3, 8.6e-3, 10.7e-3, 12.6e-3, 16.1e-3, 17.7e-3, 31.0e-3)),
    {})


@cache
def _range(rows: int) -> int:
    """Steps that share a correction: those of 1, 2, … 8 rows each, of 9-12, 13-16, 17-24, 25-32, then twice as many each."""
    if rows <= 8:
        return rows
    if rows <= 16:
        return 9 + (rows > 12)
    return 11 + (rows > 24) if rows <= 32 else min(7 + (rows - 1).bit_length(), RANGES - 1)


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
    """A table and its corrections: one set for plain steps, one for steps with drafts, which cost more than their rows alone."""

    def __init__(self, table: CostTable = DEFAULT) -> None:
        self.table = table
        self.steps = 0
        self.scales = [1.0, 1.0]  # of ranges that were never seen
        self._counts = [0, 0]
        self._last = [0] * (2 * RANGES)  # the step that last had so many rows, plain and drafted
        self._cache: dict[int, list[float]] = {}  # context -> uncorrected seconds by rows
        self._lines: dict[int, Array] = {}  # the same as arrays
        self.words = aligned((4 * RANGES,), "f8")  # corrections of plain steps, of drafted ones, then how often each was seen
        self.words[: 2 * RANGES] = 1.0
        self._view: memoryview[Any] = memoryview(self.words)  # type: ignore[arg-type]

    def step_s(self, rows: int, context: int, *, drafted: bool = False) -> float:
        """Seconds of a step of `rows` rows, after `context` tokens a sequence in the mean."""
        return self._raw(rows, context) * self._factor(_range(rows), drafted)

    def line(self, rows: int, more: int, context: int) -> list[float]:
        """`step_s` of `rows` rows, and of `rows` + 1, … `rows` + `more` rows with drafts: a choice looks at all of them, every step."""
        found, last, factor = [self.step_s(rows, context)], -1, 1.0
        for count, seconds in enumerate(self.raw(context, rows + more)[rows + 1 : rows + more + 1].tolist(), rows + 1):
            i = _range(count)
            if i != last:
                last, factor = i, self._factor(i, drafted=True)
            found.append(seconds * factor)
        return found

    def stale(self, rows: int) -> bool:
        """Whether plain steps of so many rows should be tried: there were hardly any, or none for long."""
        i = _range(rows)
        return self._view[2 * RANGES + i] < TRIED or self.steps - self._last[i] >= STALE

    def learn(self, rows: int, context: int, seconds: float, *, drafted: bool = False) -> None:
        """A step was run."""
        if rows < 1:
            return
        ratio = seconds / self._raw(rows, context)
        self.steps += 1
        i, kind, view = _range(rows), int(drafted), self._view
        at = kind * RANGES + i
        seen, factor = view[2 * RANGES + at], view[at]
        if seen < TRIED and self._counts[0] > TRIED:
            factor = self.scales[0]  # one hiccup must not price drafts out for good
        if seen >= TRIED or self._counts[0] > TRIED:
            bound = BOUND if seen >= TRIED else FIRST_BOUND
            ratio = min(max(ratio, factor / bound), factor * bound)
        factor = view[at]
        self._counts[kind] += 1
        self.scales[kind] += (ratio - self.scales[kind]) * max(SHARE, 1 / self._counts[kind])
        if not self._counts[1]:
            self.scales[1] = self.scales[0]  # as good a guess as any
        self._last[at] = self.steps
        if not drafted:
            self._forget()
        view[2 * RANGES + at] = seen + 1
        view[at] = factor + (ratio - factor) * max(SHARE, 1 / (seen + 1))

    def _forget(self) -> None:
        """What was not drafted for long is not known any more: else drafts that once were dear would never be tried again."""
        self.scales[1] += (self.scales[0] - self.scales[1]) * FORGET
        at = RANGES + self.steps % RANGES
        if self.steps - self._last[at] >= STALE:
            self._view[2 * RANGES + at] = 0

    def _factor(self, i: int, drafted: bool) -> float:
        """Of a range of rows, as far as it is known, else the scale of all."""
        at = drafted * RANGES + i
        weight = min(1.0, self._view[2 * RANGES + at] / TRIED)
        factor: float = weight * self._view[at] + (1 - weight) * self.scales[drafted]
        return factor

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
