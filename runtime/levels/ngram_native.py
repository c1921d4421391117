"""The n-gram level on the artifact's native functions: a request's counts are one block of memory, and nothing is computed here.

The block is u64 words (templates/tir/ngram.jinja has the tables' formats):
  [0] observed tokens  [1] context mask  [2] pair mask  [3..6] first word of: context records, pairs, journal, history
It is sized for a number of tokens; a longer history moves to a block of twice that, where it is observed again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.base import NativeFunction
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.levels.base import LevelState
from mlsdc.runtime.levels.counts import Counts
from mlsdc.runtime.levels.coupling import Draw
from mlsdc.runtime.levels.ngram import NgramLevel
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.step import Array, aligned
from mlsdc.runtime.tree import EMPTY, MAX_NODES, Tree

HEADER, RECORD, PAIR = 16, 8, 2
FIRST_TOKENS = 512
NAMES = ("ngram_observe", "ngram_rollback", "ngram_propose")
Functions = Callable[[str], "NativeFunction | None"]


class NativeNgramLevel(NgramLevel):
    """`NgramLevel`, its states in native code."""

    def __init__(self, info: LevelInfo, index: int, functions: Functions, counts: Counts | None = None) -> None:
        super().__init__(info, index, counts)
        self.observe_tokens, self.rollback_tokens, self.propose_tree = (self._found(functions, name) for name in NAMES)
        self.tables = address(self.counts.entries), address(self.counts.kinds), address(self.counts.vocab)
        self.sizes = self.counts.slots, self.counts.order if counts else -1

    @classmethod
    def load(cls, info: LevelInfo, index: int, functions: Functions, artifact: Artifact) -> NgramLevel:
        """The level with the artifact's static counts, if any; in Python where the target has no host code. Raises ArtifactError."""
        file = info.params.get("counts")
        counts = Counts.open(artifact.path(str(file)), artifact.manifest.model.vocab_size) if file else None
        python = NgramLevel(info, index, counts)
        hosted = any(functions(f"{name}_order{python.order}") for name in NAMES)
        return cls(info, index, functions, counts) if hosted else python

    def _found(self, functions: Functions, name: str) -> NativeFunction:
        function = functions(f"{name}_order{self.order}")
        if function is None:
            raise ArtifactError(f"level '{self.name}': the artifact has no native '{name}' of order {self.order}; compile again")
        return function

    def start(self) -> LevelState:
        return NativeNgramState(self)


class Layout(NamedTuple):
    """Of a block: the mask of both tables, the first words of its parts, and how many words it has."""

    mask: int
    contexts: int
    pairs: int
    journal: int
    history: int
    words: int


def layout(num_tokens: int, order: int) -> Layout:
    """Of a block with room for `num_tokens` tokens. Tables are at most 3/4 full."""
    entries = 1 << max(4, ((order + 1) * num_tokens * 4 // 3).bit_length())
    pairs = HEADER + entries * RECORD
    journal = pairs + entries * PAIR
    history = journal + num_tokens * (order + 1)
    return Layout(entries - 1, HEADER, pairs, journal, history, history + num_tokens)


def block(num_tokens: int, order: int) -> Array:
    """An empty state with room for `num_tokens` tokens, u64 words."""
    at = layout(num_tokens, order)
    words = aligned((at.words,), "u8")
    words[1:7] = at.mask, at.mask, at.contexts, at.pairs, at.journal, at.history
    return words


def address(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class NativeNgramState(LevelState):
    def __init__(self, level: NativeNgramLevel) -> None:
        self.level = level
        self._room = 0
        self._tree = aligned((3 * 64,), "i4")  # tokens, parents, count
        self._probabilities = aligned((64,), "f4")
        self._pointers = address(self._tree), address(self._probabilities)
        self.draws = 0, 0  # whether the request draws, and with which seed, as a signed word
        self._grow(FIRST_TOKENS)

    def _grow(self, num_tokens: int) -> None:
        old = self.history if self._room else None
        self.words = block(num_tokens, self.level.order)
        self._address = address(self.words)
        self._room = num_tokens
        self.num_observed = 0
        if old is not None:
            self._observe(old)

    @property
    def history(self) -> Array:
        """The observed tokens, i32."""
        start = int(self.words[6])
        return self.words[start : start + self.num_observed].astype(np.int32)

    def couple(self, draw: Draw) -> None:
        self.draws = 1, draw.seed - (draw.seed >> 63 << 64)

    def has_room(self, num_tokens: int) -> bool:
        """Whether so many tokens more fit into its block."""
        return self.num_observed + num_tokens <= self._room

    def observe(self, tokens: Sequence[int]) -> None:
        if not len(tokens):
            return
        if not self.has_room(len(tokens)):
            self._grow(max(2 * self._room, 1 << (self.num_observed + len(tokens)).bit_length()))
        self._observe(np.array(tokens, np.int32))

    def _observe(self, tokens: Array) -> None:
        self.level.observe_tokens(0, len(tokens), self._address, address(tokens))
        self.num_observed += len(tokens)

    def rollback(self, num_tokens: int) -> None:
        count = min(num_tokens, self.num_observed)
        if count > 0:
            self.level.rollback_tokens(0, count, self._address)
            self.num_observed -= count

    def propose(self, budget: int) -> Tree:
        level = self.level
        budget = min(budget, level.max_nodes, MAX_NODES)
        if budget <= 0:
            return EMPTY
        level.propose_tree(
            0, 1, self._address, *level.tables, *self._pointers, *level.sizes, budget, level.width, *self.draws,
            level.live_weight, level.min_probability)
        count = int(self._tree[128])
        return level.tree(self._tree[:count].tolist(), self._tree[64 : 64 + count].tolist(), self._probabilities[:count].tolist())
