"""What speculation did, with one definition of each figure (DESIGN 1).

A *step* is a target step of a request that is past its prompt. `drafted` are the nodes sent to be verified, `accepted` those that
were committed; the bonus token is in neither. Acceptance rate = accepted / drafted. Acceptance length = tokens per target step, bonus
included = 1 + accepted / steps. The rate at depth d = steps that accepted at d / steps that offered d.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class DepthCount:
    """Steps that offered a node at one depth, and those that accepted one there."""

    offered: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.accepted / self.offered if self.offered else 0.0


@dataclass
class LevelStatistics:
    """One drafting level's share. `depths[d - 1]` is depth d."""

    drafted: int = 0
    accepted: int = 0
    depths: list[DepthCount] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def merge(self, other: LevelStatistics) -> None:
        self.drafted += other.drafted
        self.accepted += other.accepted
        for depth, count in enumerate(other.depths, 1):
            mine = self._depth(depth)
            mine.offered += count.offered
            mine.accepted += count.accepted

    def _depth(self, depth: int) -> DepthCount:
        while len(self.depths) < depth:
            self.depths.append(DepthCount())
        return self.depths[depth - 1]


@dataclass
class Statistics:
    """Of one request, or of many merged. `levels` is keyed by level name."""

    steps: int = 0
    prefill_rows: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    preemptions: int = 0
    levels: dict[str, LevelStatistics] = field(default_factory=dict)

    @property
    def drafted(self) -> int:
        return sum(level.drafted for level in self.levels.values())

    @property
    def accepted(self) -> int:
        return sum(level.accepted for level in self.levels.values())

    @property
    def acceptance_rate(self) -> float:
        drafted = self.drafted
        return self.accepted / drafted if drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per target step, bonus included; 0 if there was no step."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    def count_step(self, names: Sequence[str], depths: Sequence[int], accepted: Collection[int]) -> None:
        """A step whose node i was proposed by level `names[i]` at `depths[i]`; `accepted` are the committed nodes' indices."""
        self.steps += 1
        for name in set(names):
            level = self.levels.get(name)
            if level is None:
                level = self.levels[name] = LevelStatistics()
            level.drafted += names.count(name)
            for depth in {depth for depth, of in zip(depths, names, strict=True) if of == name}:
                level._depth(depth).offered += 1
        for node in accepted:
            level = self.levels[names[node]]
            level.accepted += 1
            level._depth(depths[node]).accepted += 1

    def merge(self, other: Statistics) -> None:
        """Add another request's figures to these."""
        self.steps += other.steps
        self.prefill_rows += other.prefill_rows
        self.cached_tokens += other.cached_tokens
        self.tokens += other.tokens
        self.preemptions += other.preemptions
        for name, level in other.levels.items():
            self.levels.setdefault(name, LevelStatistics()).merge(level)

    def to_dict(self) -> Mapping[str, object]:
        """Plain numbers, for JSON."""
        return {
            "steps": self.steps, "tokens": self.tokens, "prefill_rows": self.prefill_rows, "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions, "drafted": self.drafted, "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate, "acceptance_length": self.acceptance_length,
            "levels": {
                name: {
                    "drafted": level.drafted, "accepted": level.accepted, "acceptance_rate": level.acceptance_rate,
                    "depths": [{"offered": d.offered, "accepted": d.accepted, "rate": d.rate} for d in level.depths],
                } for name, level in self.levels.items()
            },
        }
