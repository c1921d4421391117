"""The controller's decisions by native code, over arrays of all requests: those of runtime/controller.py, which says what they mean.

A request has a *slot*, a row of every array (runtime/native_words.py). `choose` and `learn` take proposals as the plain controller does;
runtime/native_drafting.py fills the arrays itself and runs the same two functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlsdc.runtime import native_words as W
from mlsdc.runtime.controller import DEPTHS, Controller, Drafter, Proposal, said
from mlsdc.runtime.costs import RANGES, Costs, ranges
from mlsdc.runtime.device.host_list import HostList
from mlsdc.runtime.step import Array, aligned

MakeList = Callable[[Sequence[tuple[str, Sequence[Any]]]], HostList]
CHOOSE, LEARN = "draft_choose", "draft_learn"
RAW = 8  # places of arguments that change
SLOTS = 8  # to begin with


class SlotDrafter(Drafter):
    """What the controller keeps of one request, in its slot."""

    def __init__(self, number: int, slot: int, arrays: Arrays) -> None:
        self.id, self.slot, self.arrays = number, slot, arrays
        row = arrays.drafter[slot]
        row[:] = 0.0
        row[W.TAKEN] = -1.0

    def __repr__(self) -> str:
        return f"SlotDrafter({self.id} at {self.slot})"


def _word(word: int, number: type) -> Any:
    def get(self: SlotDrafter) -> Any:
        return number(self.arrays.drafter[self.slot, word])

    def put(self: SlotDrafter, value: float) -> None:
        self.arrays.drafter[self.slot, word] = value

    return property(get, put)


for _name, _place, _type in (("asked", W.TIMES_ASKED, int), ("worth", W.WORTH, float), ("taken", W.TAKEN, float), ("pause", W.PAUSE, int),
                             ("last_pause", W.LAST_PAUSE, int), ("paused_at", W.PAUSED_AT, int)):
    setattr(SlotDrafter, _name, _word(_place, _type))


class Arrays:
    """Everything that is kept by slot, for `slots` of them, and of all requests."""

    def __init__(self, levels: int) -> None:
        self.levels = levels
        self.slots = 0
        self.step = aligned((W.STEP_WORDS,), "f8")
        self.everyone = aligned((2, levels * DEPTHS, W.ALL_RATE), "f8")
        self.worth = aligned((64, 2), "f8")
        self.grow(SLOTS)

    def grow(self, slots: int) -> None:
        """Room for so many slots; what there is moves."""
        nodes, rates = (slots, W.NODES), W.OWN + self.levels * DEPTHS * W.OWN_RATE
        shapes = {
            "list": ((slots,), "i4"), "tree": ((slots, W.TREE), "i4"), "prob": (nodes, "f4"), "level": (nodes, "i4"),
            "drafter": ((slots, rates), "f8"), "chance": (nodes, "f8"), "gain": ((slots,), "f8"), "scratch": ((slots, W.SCRATCH), "i4"),
            "pick": ((slots * W.NODES,), "i4"), "kept": ((slots, 4, W.NODES), "i4"), "kept_count": ((slots,), "i4"), "words": (nodes, "u8"),
            "committed": (nodes, "i4"), "committed_count": ((slots,), "i4"), "budget": ((slots,), "i4"), "wish": ((slots,), "i4")}
        for name, (shape, dtype) in shapes.items():
            made = aligned(shape, dtype)
            if self.slots:
                made[: len(getattr(self, name))] = getattr(self, name)
            setattr(self, name, made)
        self.slots = slots

    list: Array
    tree: Array
    prob: Array
    level: Array
    drafter: Array
    chance: Array
    gain: Array
    scratch: Array
    pick: Array
    kept: Array
    kept_count: Array
    words: Array
    committed: Array
    committed_count: Array
    budget: Array
    wish: Array


class Views:
    """Flat views of the arrays that a step reads and writes one number at a time: a tenth of what an array asks for that."""

    def __init__(self, arrays: Arrays) -> None:
        self.step, self.list, self.kept, self.kept_count = flat(arrays.step), flat(arrays.list), flat(arrays.kept), flat(arrays.kept_count)
        self.words, self.committed, self.committed_count = flat(arrays.words), flat(arrays.committed), flat(arrays.committed_count)
        self.budget, self.wish = flat(arrays.budget), flat(arrays.wish)


def flat(array: Array) -> memoryview[Any]:
    """All numbers of an array, one after the other."""
    return memoryview(array.reshape(-1))  # type: ignore[arg-type]


class NativeController(Controller):
    """`levels`: how many level indices a node may have; `make_list` binds native functions to arrays."""

    def __init__(self, make_list: MakeList, levels: int, costs: Costs | None = None) -> None:
        super().__init__(costs)
        self.arrays = Arrays(levels)
        self._make_list = make_list
        self._free = list(range(self.arrays.slots - 1, -1, -1))
        self._ranges = ranges(1024)
        self._raw: Array | None = None
        self.grown = 0  # how often addresses have changed
        self._bind()

    def _bind(self) -> None:
        a = self.arrays
        raw = self.costs.raw(0, 64) if self._raw is None else self._raw
        corrections = self.costs.words
        self._choose = self._make_list([(CHOOSE, (
            a.step, a.list, a.tree, a.prob, a.level, a.drafter, a.everyone, a.worth, raw, self._ranges, corrections,
            corrections[2 * RANGES :], a.chance, a.gain, a.scratch, a.pick, a.kept, a.kept_count, a.words, a.levels))])
        self._learn = self._make_list([(LEARN, (
            a.step, a.list, a.tree, a.prob, a.level, a.drafter, a.everyone, a.committed, a.committed_count, a.budget, a.wish, a.levels))])
        self._choose.counts[0] = self._learn.counts[0] = 1
        self.views = Views(a)

    # --- requests ---

    def drafter(self, number: int) -> Drafter:
        if not self._free:
            slots = self.arrays.slots
            self.arrays.grow(2 * slots)
            self._free = list(range(2 * slots - 1, slots - 1, -1))
            self.grown += 1
            self._bind()
        return SlotDrafter(number, self._free.pop(), self.arrays)

    def leave(self, drafter: Drafter) -> None:
        if isinstance(drafter, SlotDrafter) and drafter.arrays is self.arrays:
            self._free.append(drafter.slot)

    # --- the plain controller's data, where they are kept here ---

    def know(self, rates: Any, names: Sequence[str]) -> None:
        super().know(rates, names)
        for sampled, found in self._all.items():
            for (level, depth), sums in found.sums.items():
                if level < self.arrays.levels:
                    self.arrays.everyone[int(sampled), level * DEPTHS + depth - 1] = sums

    def _everyones_worth(self, sequences: int) -> tuple[float, float]:
        seen, worth = self.arrays.worth[sequences.bit_length()].tolist()
        return seen, worth

    # --- decisions ---

    def run_choose(self, asked: int, rows: int, sequences: int, context: int, draft_s: float, nodes: int) -> None:
        """Choose for the slots `list[:asked]`, whose trees are there and have `nodes` nodes at most altogether."""
        raw = self.costs.raw(context, rows + nodes)
        if raw is not self._raw:
            self._raw = raw
            self._choose.set(0, RAW, raw)
            if len(raw) > len(self._ranges):
                self._ranges = ranges(2 * len(raw))
                self._choose.set(0, RAW + 1, self._ranges)
        step = self.views.step
        step[W.ROWS], step[W.SEQUENCES], step[W.DRAFT_S], step[W.ASKED] = rows, sequences, draft_s, asked
        step[W.STALE], step[W.MOST_S] = self.costs.stale(rows), self.most_s(sequences, context)
        step[W.SCALE], step[W.DRAFTED_SCALE] = self.costs.scales
        step[W.SHORTEST] = self.shortest(asked, sequences, draft_s, self.costs.step_s(rows, context))
        step[W.TRIALS] = self.trials()
        self._choose.run()

    def run_learn(self, count: int) -> None:
        """Score the trees of the slots `list[:count]` against `committed`, and set their `wish`."""
        step = self.views.step
        step[W.ASKED], step[W.LAST_ROWS] = count, self._rows
        self._learn.run()

    def _decide(self, proposals: Sequence[Proposal], rows: int, sequences: int, context: int, draft_s: float) -> list[list[int]]:
        a = self.arrays
        slots = [self._load(proposal) for proposal in proposals]
        a.list[: len(slots)] = slots
        self.run_choose(len(slots), rows, sequences, context, draft_s, sum(len(proposal.tree) for proposal in proposals))
        return [a.kept[slot, 3, : a.kept_count[slot]].tolist() for slot in slots]

    def _score(self, proposal: Proposal, committed: Sequence[int]) -> None:
        a = self.arrays
        slot = self._load(proposal)
        count = min(len(committed), W.NODES)
        a.list[0], a.committed_count[slot] = slot, count
        a.committed[slot, :count] = committed[:count]
        paused = a.drafter[slot, W.PAUSE]
        self.run_learn(1)
        a.drafter[slot, W.PAUSE] = paused  # `wish` is asked for by itself

    def _load(self, proposal: Proposal) -> int:
        a, tree, drafter = self.arrays, proposal.tree, proposal.drafter
        assert isinstance(drafter, SlotDrafter)
        slot, count = drafter.slot, len(tree)
        a.tree[slot, :count], a.tree[slot, W.NODES : W.NODES + count], a.tree[slot, W.COUNT] = tree.tokens, tree.parents, count
        a.prob[slot, :count] = [said(tree, node) for node in range(count)]
        a.level[slot, :count] = tree.levels or (0,) * count
        a.drafter[slot, W.SAMPLED] = proposal.sampled
        return slot
