"""Parameters of the Triton templates with which trees grow on the device, and with which rows are made behind the target's step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.runtime.followed import NUM_TOKENS, ROWS, TOKENS
from mlsdc.runtime.levels.grown import CHILDREN, FIELDS, GROWN_WORDS, GROWTH_WORDS, HEAD, MOST, NODE_WORDS, NODES, SPREAD, Growing
from mlsdc.runtime.step import FOLLOWED_WORDS, SCRATCH_SLOTS
from mlsdc.templates.params_triton import digest, power_of_two


@dataclass(frozen=True)
class Grow:
    """`grow`: a round of trees that grow on the device. Rows have `k` guesses and, for levels with features, a hidden state of `width`.

    `ids`: entries of the table of the target's token of each of the level's, 0 if they are the same, below `limit` then. `own_ids`: the
    level reads its own tokens, not the target's.
    """

    template: ClassVar[str] = "grow"
    record: ClassVar[type[Growing]] = Growing
    spread: ClassVar[int] = SPREAD
    most: ClassVar[int] = MOST
    nodes: ClassVar[int] = NODES
    fields: ClassVar[int] = FIELDS
    scratch_slots: ClassVar[int] = SCRATCH_SLOTS
    growth_words: ClassVar[int] = GROWTH_WORDS
    node_words: ClassVar[int] = NODE_WORDS
    grown_words: ClassVar[int] = GROWN_WORDS
    head: ClassVar[int] = HEAD

    k: int
    width: int
    ids: int
    own_ids: bool
    limit: int

    def __post_init__(self) -> None:
        if not 0 < self.k <= CHILDREN:
            raise ValueError(f"{self.k} guesses of a row; a tree takes 1 to {CHILDREN}")

    @property
    def k_block(self) -> int:
        return power_of_two(self.k)

    @property
    def width_block(self) -> int:
        return min(256, power_of_two(max(self.width, 16)))

    @property
    def key(self) -> str:
        return f"grow_k{self.k}_w{self.width}_{digest(self)}"


@dataclass(frozen=True)
class AheadRows:
    """`ahead_rows`: rows of what a step has committed, for a level that runs behind it. With `taps` each starts from so many of the
    target's hidden states of `hidden` channels, side by side; with `last_only` a sequence has one row, of the last state."""

    template: ClassVar[str] = "ahead_rows"
    record: ClassVar[type[Growing]] = Growing
    growth_words: ClassVar[int] = GROWTH_WORDS
    grown_words: ClassVar[int] = GROWN_WORDS
    followed_words: ClassVar[int] = FOLLOWED_WORDS
    rows_at: ClassVar[int] = ROWS
    tokens_at: ClassVar[int] = TOKENS
    num_tokens_at: ClassVar[int] = NUM_TOKENS
    slots: ClassVar[int] = SCRATCH_SLOTS

    taps: int
    hidden: int
    last_only: bool

    @property
    def key(self) -> str:
        return f"ahead_rows_t{self.taps}_h{self.hidden}_{digest(self)}"


@dataclass(frozen=True)
class BringRows:
    """`bring_rows`: rows of a result to where another list reads them."""

    template: ClassVar[str] = "bring_rows"

    width: int

    @property
    def key(self) -> str:
        return f"bring_rows_w{self.width}"
