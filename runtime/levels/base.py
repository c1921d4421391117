"""What a level is to the engine: something that watches one request's tokens and proposes what comes next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from mlsdc.runtime.tree import Tree


class LevelState(ABC):
    """One level's view of one request.

    Contract:
    - `observe` gets every committed token once and in order (the prompt first, in any chunks);
    - `propose` never raises, whatever was observed, an empty history included, and never changes what was observed; its cost does not
      grow with the history;
    - `rollback(n)` forgets the last n observed tokens and leaves the state as if they had never been observed.
    """

    @abstractmethod
    def observe(self, tokens: Sequence[int]) -> None: ...

    @abstractmethod
    def propose(self, budget: int) -> Tree:
        """A tree of at most `budget` nodes that may follow the observed tokens; empty if there is nothing to propose."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None: ...


class Level(ABC):
    """A level of the artifact's cascade. `start` makes the state of one request."""

    name: str
    kind: str

    @abstractmethod
    def start(self) -> LevelState: ...
