"""Figures of interleaved rounds: the median, and the lowest and highest round beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured quantity, a value a round. `note` says what it is relative to, or what was counted."""

    name: str
    unit: str
    values: tuple[float, ...]
    note: str = ""

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "unit": self.unit, "note": self.note, "median": self.median, "low": self.low, "high": self.high,
            "values": list(self.values),
        }  # fmt: skip


def interleave(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, tuple[float, ...]]:
    """Run all cases in turn, `rounds` times after one round that is thrown away: what slows the machine for a while slows all of them."""
    values: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, case in cases.items():
            value = case()
            if turn:
                values[name].append(value)
    return {name: tuple(found) for name, found in values.items()}


def by_round(left: Sequence[float], right: Sequence[float]) -> tuple[float, ...]:
    """left / right, round by round: neighbours in time are compared."""
    return tuple(a / b for a, b in zip(left, right, strict=True))
