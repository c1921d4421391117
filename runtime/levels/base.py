"""What a level is to the engine: something that watches one request's tokens and proposes what comes next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from mlsdc.runtime.tree import Tree

if TYPE_CHECKING:
    from mlsdc.runtime.device.base import LevelMemory
    from mlsdc.runtime.kv_pool import KvPool, PageTable
    from mlsdc.runtime.levels.coupling import Draw


T = TypeVar("T")
Rounds: TypeAlias = Generator[None, None, T]  # work that stops wherever programs were started whose results it reads next


def finished(rounds: Rounds[T]) -> T:
    """What rounds come to, one after the other."""
    while True:
        try:
            next(rounds)
        except StopIteration as end:
            found: T = end.value
            return found


def together(every: Sequence[Rounds[T]]) -> list[T]:
    """What several rounds come to, in turn: all start their programs before the first one waits, so that one wait is for all of them."""
    found: dict[int, T] = {}
    while len(found) < len(every):
        for i, rounds in enumerate(every):
            if i not in found:
                try:
                    next(rounds)
                except StopIteration as end:
                    found[i] = end.value
    return [found[i] for i in range(len(every))]


class LevelState(ABC):
    """One level's view of one request.

    Contract:
    - `observe` gets every committed token once and in order (the prompt first, in any chunks);
    - `propose` never raises, whatever was observed, an empty history included, and never changes what was observed; its cost does not
      grow with the history;
    - `rollback(n)` forgets the last n observed tokens and leaves the state as if they had never been observed.
    """

    drawn: Draw | None = None  # how its request draws, if it does

    @property
    def prepared(self) -> bool:
        """Whether its request is to be asked in this step; False: what it proposes is being made, and is there in the next one."""
        return True

    @abstractmethod
    def observe(self, tokens: Sequence[int]) -> None: ...

    @abstractmethod
    def propose(self, budget: int) -> Tree:
        """A tree of at most `budget` nodes that may follow the observed tokens; empty if there is nothing to propose."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None: ...

    def place(self, table: PageTable, computed: int) -> None:
        """Before every draft: the target's pages of the request, of which the first `computed` positions are written."""

    def couple(self, draw: Draw) -> None:
        """The request's choices will be drawn like this (law L1): proposals may look at the same draws. Once, before the first one."""
        self.drawn = draw

    def only(self, names: Collection[str]) -> None:
        """Of the levels it is a state of, only those of these names draft for its request. Once, before the first draft."""

    def release(self) -> bool:
        """Give back the pages it holds, because the target needs them or the request is over; the next draft begins anew.

        Returns whether it held any. No draft is under way.
        """
        return False


class Level(ABC):
    """A level of the artifact's cascade. `start` makes the state of one request."""

    name: str
    kind: str
    reads_target: bool = False  # it wants the target's hidden states: its states begin with their request, not with the first draft

    @property
    def looks_ahead(self) -> bool:
        """It works behind the target's programs: `ahead` is to be called. Known once it is bound."""
        return False

    @abstractmethod
    def start(self) -> LevelState: ...

    def bind(self, memory: LevelMemory, target: LevelMemory, pool: KvPool | None) -> None:
        """Once, at load, for a level with programs: its own memory, the target's, and its pages, if it has any."""

    def propose_all(self, states: Sequence[LevelState], budgets: Sequence[int]) -> list[Tree]:
        """The trees of several requests at once: a level with programs runs them for all together. Same contract as `propose`."""
        return [state.propose(budget) for state, budget in zip(states, budgets, strict=True)]

    def propose_rounds(self, states: Sequence[LevelState], budgets: Sequence[int]) -> Rounds[list[Tree]]:
        """`propose_all`, in rounds where all that its programs write is the level's own: others may run theirs in between.
        Here: all of it, once the others have started theirs."""
        yield
        return self.propose_all(states, budgets)

    def ahead(self, states: Sequence[LevelState | None]) -> None:
        """The target's programs of a step and `follow` (runtime/followed.py) are started: work behind them, for the states of the step's
        sequences, in order, that have observed all that was committed before the step; None: not for that one. Only if `looks_ahead`."""

    def stepped(self, states: Sequence[LevelState | None], firsts: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """The target has run a step: of its item i, rows `rows[i]` of the step are committed, at positions `firsts[i]` and on.

        The target's taps hold their hidden states until its next run. A level that reads none ignores this.
        """


class Verifier(Level):
    """A level that can stand above another one."""

    @abstractmethod
    def propose_above(self, states: Sequence[LevelState], budgets: Sequence[int], below: Sequence[Tree]) -> list[Tree]:
        """`propose_all`, where `below` are the trees of the level below: it judges and extends them."""
