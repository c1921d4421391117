"""Parameters of the Triton templates that work behind a step's choices: where they led, and what levels draft from that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.runtime import followed
from mlsdc.runtime.step import FOLLOWED_WORDS, SCRATCH_SLOTS


@dataclass(frozen=True)
class Follow:
    """`follow`: the choices of every sequence, down its tree."""

    template: ClassVar[str] = "follow"
    followed: ClassVar[object] = followed
    words: ClassVar[int] = FOLLOWED_WORDS
    slots: ClassVar[int] = SCRATCH_SLOTS

    @property
    def key(self) -> str:
        return "follow"
