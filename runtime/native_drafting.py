"""An n-gram level's drafts for all requests of a step by two native calls: one observes and proposes for each, one chooses among all.

The arrays are those of runtime/native_controller.py; a request's counts stay in its level state, wherever that was made. What a step costs
in Python is a few array writes a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlsdc.runtime import native_words as W
from mlsdc.runtime.levels.ngram_native import NAMES, NativeNgramLevel, NativeNgramState
from mlsdc.runtime.native_controller import MakeList, NativeController, SlotDrafter, flat
from mlsdc.runtime.step import Array, aligned
from mlsdc.runtime.tree import MAX_NODES, Tree

BUDGET = 8  # place of the budget among the arguments of `ngram_propose`
STAGED = 64  # new tokens of a request that one call observes; more are observed by themselves
NOT_ASKED = -1


class Seat:
    """One request: its slot, and its counts, which begin when it is asked for the first time. `before`: how many tokens it had when it was
    asked, NOT_ASKED in a step in which it was not."""

    __slots__ = ("before", "drafter", "slot", "state", "words")

    def __init__(self, drafter: SlotDrafter) -> None:
        self.drafter, self.slot = drafter, drafter.slot
        self.state: NativeNgramState | None = None
        self.words: Array | None = None
        self.before = NOT_ASKED


class NgramBatch:
    """One engine's. The step owns it: not thread-safe."""

    def __init__(self, level: NativeNgramLevel, controller: NativeController, make_list: MakeList) -> None:
        self.level, self.controller = level, controller
        self._make_list = make_list
        self._seats: dict[int, Seat] = {}  # by request id
        self._asked: list[int] = []  # slots
        self._nodes = 0
        self._bind()

    def _bind(self) -> None:
        """Calls 2 s and 2 s + 1 are of slot s: observe, propose."""
        level, arrays = self.level, self.controller.arrays
        observe, _, propose = (f"{name}_order{level.order}" for name in NAMES)
        self._stage = aligned((arrays.slots, STAGED), "i4")
        self._staged = flat(self._stage)
        nobody = level.counts.entries  # a slot without a request is never run
        counts, calls = level.counts, list[tuple[str, Sequence[Any]]]()
        for slot in range(arrays.slots):
            calls.append((observe, (nobody, self._stage[slot])))
            calls.append((propose, (
                nobody, counts.entries, counts.kinds, counts.vocab, arrays.tree[slot], arrays.prob[slot], *level.sizes, 0, level.width,
                0, 0, level.live_weight, level.min_probability)))
        self._list = self._make_list(calls)
        self._counts = flat(self._list.counts)
        self._budgets = [flat(self._list.args[2 * slot + 1]) for slot in range(arrays.slots)]
        self._grown = self.controller.grown
        arrays.level[:] = level.index
        for seat in self._seats.values():
            if seat.state is not None:
                self.begin(seat, seat.state)

    def seat(self, number: int) -> Seat | None:
        """Of the request of that id, if it has one."""
        return self._seats.get(number)

    def sit(self, number: int, drafter: SlotDrafter) -> Seat:
        """Give a request a seat. Nobody is asked yet in this step."""
        assert not self._asked
        if self._grown != self.controller.grown:
            self._bind()
        seat = self._seats[number] = Seat(drafter)
        return seat

    def leave(self, number: int) -> None:
        self._seats.pop(number, None)

    def begin(self, seat: Seat, state: NativeNgramState) -> None:
        """The calls of its slot are about these counts from now on."""
        slot = seat.slot
        coupled, seed = state.draws
        seat.state, seat.words = state, state.words
        self._list.set(2 * slot, 0, state.words)
        self._list.set(2 * slot + 1, 0, state.words)
        self._list.set(2 * slot + 1, BUDGET + 2, coupled)
        self._list.set(2 * slot + 1, BUDGET + 3, seed)
        self.controller.arrays.drafter[slot, W.SAMPLED] = coupled

    # --- a step ---

    def ask(self, seat: Seat, tokens: Sequence[int], budget: int) -> None:
        """`draft` will propose at most `budget` nodes for a request that has these committed tokens."""
        state, slot = seat.state, seat.slot
        assert state is not None
        seen, seat.before = state.num_observed, len(tokens)
        new = seat.before - seen
        if new > STAGED or not state.has_room(new):
            state.observe(tokens[seen:])
            new = 0
        elif new:
            first, stage = slot * STAGED, self._staged
            for i in range(new):
                stage[first + i] = tokens[seen + i]
            state.num_observed = seat.before
        if state.words is not seat.words:  # its block moved, here or where it was asked by itself
            self.begin(seat, state)
        budget = min(budget, self.level.max_nodes, MAX_NODES)
        self._counts[2 * slot] = new
        self._counts[2 * slot + 1] = 1
        self._budgets[slot][2 * (2 + BUDGET) + 1] = budget
        self._nodes += budget
        self._asked.append(slot)

    def draft(self, rows: int, sequences: int, context: int, draft_s: float) -> list[Tree | None]:
        """What is sent of the proposals for all that were asked since the last time, in that order; None: nothing."""
        slots, controller, index = self._asked, self.controller, self.level.index
        view = controller.views
        for i, slot in enumerate(slots):
            view.list[i] = slot
        self._list.run()
        controller.run_choose(len(slots), rows, sequences, context, draft_s, self._nodes)
        self._asked, self._nodes = [], 0
        trees: list[Tree | None] = []
        for slot in slots:
            self._counts[2 * slot] = self._counts[2 * slot + 1] = 0
            count = view.kept_count[slot]
            if not count:
                trees.append(None)
                continue
            at, word = slot * W.KEPT, slot * W.NODES
            tokens, parents, depths = (view.kept[at + i * W.NODES : at + i * W.NODES + count].tolist() for i in range(3))
            trees.append(Tree.made(tokens, parents, index, depths, view.words[word : word + count + 1].tolist()))
        return trees

    def learn(self, seats: Sequence[Seat], tokens: Sequence[Sequence[int]], budgets: Sequence[int]) -> list[int]:
        """After a step: all tokens of each request, and how many nodes the next step may draft for it. Returns the controller's wishes."""
        view = self.controller.views
        committed, counts = view.committed, view.committed_count
        for i, seat in enumerate(seats):
            slot = seat.slot
            view.list[i], view.budget[i] = slot, budgets[i]
            if seat.before < 0:
                counts[slot] = NOT_ASKED
                continue
            new = tokens[i][seat.before : seat.before + W.NODES]
            at, counts[slot], seat.before = slot * W.NODES, len(new), NOT_ASKED
            for j, token in enumerate(new):
                committed[at + j] = token
        self.controller.run_learn(len(seats))
        return view.wish[: len(seats)].tolist()
