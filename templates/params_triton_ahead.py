"""Parameters of the Triton templates that work behind a step's choices: where they led, and what levels draft from that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.runtime import ahead_words, followed
from mlsdc.runtime.ahead_words import CLEAR_PARTS
from mlsdc.runtime.levels.counts import CONTEXT, SEED
from mlsdc.runtime.levels.ngram import DRAWN, FOLLOWERS, WAITING
from mlsdc.runtime.levels.ngram_native import HEADER
from mlsdc.runtime.step import FOLLOWED_WORDS, SCRATCH_SLOTS
from mlsdc.templates.params_triton import power_of_two


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


@dataclass(frozen=True)
class NgramClear:
    """`ngram_clear`: empties the blocks of sequences that begin anew."""

    template: ClassVar[str] = "ngram_clear"
    words: ClassVar[object] = ahead_words
    parts: ClassVar[int] = CLEAR_PARTS
    block: ClassVar[int] = 1024

    @property
    def key(self) -> str:
        return "ngram_clear"


@dataclass(frozen=True)
class Ngram:
    """`ngram_observe` and `ngram_propose` over contexts of 0..order tokens: what templates/tir/ngram*.jinja do on CPUs."""

    template: str
    order: int

    followed: ClassVar[object] = followed
    followed_words: ClassVar[int] = FOLLOWED_WORDS
    words: ClassVar[object] = ahead_words
    seed: ClassVar[int] = SEED
    contexts: ClassVar[int] = HEADER
    context: ClassVar[int] = CONTEXT
    followers: ClassVar[int] = FOLLOWERS
    drawn: ClassVar[float] = DRAWN
    waiting: ClassVar[int] = WAITING
    n: ClassVar[int] = 0  # of the fragment that sampling kernels share: its logits
    limit: ClassVar[int] = 0
    block: ClassVar[int] = 1

    @property
    def key(self) -> str:
        return f"{self.template}_order{self.order}"

    @property
    def lanes(self) -> int:
        return power_of_two(self.order + 1)

    @property
    def candidates(self) -> int:
        """Tokens one node may choose its children from: every slot of every context, live and fixed."""
        return 2 * self.followers * (self.order + 1)

    @property
    def block_c(self) -> int:
        return power_of_two(self.candidates)

    @property
    def room(self) -> int:
        """Of the list of candidates: those that wait and those of one more node, at least."""
        return power_of_two(self.waiting + self.block_c)

    @property
    def children_at(self) -> int:
        return 4 * self.room

    @property
    def depths_at(self) -> int:
        return self.children_at + SCRATCH_SLOTS

    @property
    def lasts_at(self) -> int:
        return self.depths_at + SCRATCH_SLOTS

    @property
    def fixed_at(self) -> int:
        return self.lasts_at + 8 * SCRATCH_SLOTS

    @property
    def scratch_words(self) -> int:
        """i32 words of a sequence."""
        return self.fixed_at + 16
