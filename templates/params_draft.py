"""Parameters of the controller's native code: the constants of runtime/controller.py and runtime/costs.py, and where words lie."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.runtime import controller as C
from mlsdc.runtime import costs
from mlsdc.runtime import native_words as words
from mlsdc.templates.params import TirParams, named


@dataclass(frozen=True)
class Draft(TirParams):
    """`stem` is the function: draft_choose or draft_learn."""

    stem: str = named("", default="draft_choose")  # type: ignore[assignment]

    rules = C
    costs = costs
    words = words
