"""Parameters of the sampling and n-gram templates."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.templates.params import TirParams, named


@dataclass(frozen=True)
class Ngram(TirParams):
    """Counts over contexts of 0..order tokens. `stem` is the function: observe, rollback or propose."""

    stem: str = named("", default="ngram_observe")  # type: ignore[assignment]
    order: int = 4

    waiting = 128
    followers = 6

    @property
    def candidates(self) -> int:
        """Tokens one node may choose its children from: every slot of every context, live and fixed."""
        return 2 * self.followers * (self.order + 1)
