"""What a benchmark found: the same content as a table for people and as JSON for machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlsdc.runtime.bench.spread import Figure
from mlsdc.runtime.bench.traffic import Traffic

FORMAT = 1


@dataclass(frozen=True)
class OpTime:
    """One kernel's share of a step: how often it is launched, and the time of all its launches (median over profiled runs)."""

    kernel: str
    launches: int
    microseconds: float


@dataclass(frozen=True)
class Report:
    verb: str
    artifact: str
    sha256: str
    target: str
    threads: int
    rounds: int
    figures: Sequence[Figure]
    bytes_per_step: Traffic | None = None
    peer: str = ""
    profile: Sequence[OpTime] = ()

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "format": FORMAT, "verb": self.verb, "artifact": self.artifact, "sha256": self.sha256, "target": self.target,
            "threads": self.threads, "rounds": self.rounds, "figures": [figure.to_json() for figure in self.figures],
        }  # fmt: skip
        if self.bytes_per_step is not None:
            step = self.bytes_per_step
            found["bytes_per_step"] = {"weights": step.weights, "pages": step.pages, "total": step.total}
        if self.peer:
            found["peer"] = self.peer
        if self.profile:
            found["profile"] = [vars(op) for op in self.profile]
        return found

    def lines(self) -> Iterator[str]:
        yield f"{self.verb}: {self.artifact} ({self.sha256[:12]}), {self.target}, {self.threads} threads, {self.rounds} rounds"
        if self.peer:
            yield f"peer: {self.peer}"
        if self.bytes_per_step is not None:
            step = self.bytes_per_step
            yield f"bytes a step: {step.total:,} = {step.weights:,} of weights + {step.pages:,} of pages"
        width = max((len(figure.name) for figure in self.figures), default=0)
        yield f"{'':{width}}  {'median':>10} {'low':>10} {'high':>10}"
        for figure in self.figures:
            numbers = " ".join(f"{value:10.{digits(value)}f}" for value in (figure.median, figure.low, figure.high))
            yield f"{figure.name:{width}}  {numbers}  {figure.unit:9} {figure.note}".rstrip()
        if self.profile:
            total = sum(op.microseconds for op in self.profile)
            yield ""
            yield "time by kernel, one launch at a time (the list runs faster as a whole)"
            for op in self.profile:
                yield f"  {op.microseconds:10.1f} us {op.microseconds / total:6.1%}  {op.launches:4} x {op.kernel}"


def digits(value: float) -> int:
    """Digits behind the point that leave about four in all."""
    return 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
