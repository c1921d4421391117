"""Parameters of the TIR templates that only drafting levels use."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.templates.params import TirParams, named


@dataclass(frozen=True)
class TopK(TirParams):
    """The k largest of n numbers a row."""

    stem = "top_k"
    rows_padded: int = named("m")  # type: ignore[assignment]
    n: int = 0
    k: int = 0


@dataclass(frozen=True)
class GuessDraws(TirParams):
    """Draws of guessed tokens."""

    stem = "guess_draws"
