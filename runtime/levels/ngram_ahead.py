"""The n-gram level on a device that has its kernels: counts lie there, and a step's proposals are made behind the step before.

While the target computes a step, the host does not know what it will commit, but the device does: behind the choices it follows them down
the trees (runtime/followed.py), counts the new tokens, and proposes what comes next. The proposals come back with the choices, in the one
wait of the step; the next draft reads them and never waits. What the device holds is compared with the request's own tokens each time.
Where it is behind (a request that paused) the host feeds it what is missing, and the draft is there one step later; where it has something
else (a rollback, a block that another request took) its block is emptied and filled again. A state that no step has worked ahead for
proposes by itself, and waits.

A block is as that of ngram_native.py. There is one for each sequence of a step, with room for the longest request where all of them take
at most MOST_BYTES, else for as many tokens as fit: a longer text begins anew with the latest half of that.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlsdc.runtime import ahead_words as W
from mlsdc.runtime.device.base import Device, LevelMemory
from mlsdc.runtime.device.kernel_list import ALIGNMENT, Block, KernelCall, KernelList, list_bytes
from mlsdc.runtime.levels.base import Level, LevelState
from mlsdc.runtime.levels.coupling import Draw
from mlsdc.runtime.levels.ngram import DEFAULTS, NgramLevel
from mlsdc.runtime.levels.ngram_native import layout
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.program import InputArg
from mlsdc.runtime.step import SCRATCH_SLOTS, Limits
from mlsdc.runtime.tree import EMPTY, Tree

MOST_BYTES = 256 << 20  # of all blocks
LEAST_TOKENS = 512  # of a block, whatever that takes
SCRATCH_BYTES = 16 << 10  # of a sequence's search (templates/params_triton_ahead.py: at most)


def block_tokens(limits: Limits, order: int) -> int:
    """Room of a block."""
    tokens = limits.max_model_len + SCRATCH_SLOTS
    while tokens > LEAST_TOKENS and limits.max_num_seqs * 8 * layout(tokens, order).words > MOST_BYTES:
        tokens = max(LEAST_TOKENS, tokens // 2)
    return tokens


def device_blocks(limits: Limits, order: int, max_nodes: int, counts: Mapping[str, int]) -> dict[str, Block]:
    """What a level takes of a device; `counts`: bytes of its static tables."""
    tokens, seqs = block_tokens(limits, order), limits.max_num_seqs
    return {
        "states": Block(seqs * 8 * layout(tokens, order).words),
        "control": Block(seqs * 4 * W.CONTROL, "brought"),
        "feed": Block(4 * tokens, "sent"),
        **{name: Block(size) for name, size in counts.items()},
        "scratch": Block(seqs * SCRATCH_BYTES),
        "results": Block(seqs * 4 * (W.RESULT + 3 * max_nodes), "taken"),
    }


def device_bytes(params: Mapping[str, Any], limits: Limits, counts_bytes: int) -> int:
    """The same, of a level by its params: for plans of memory."""
    order, nodes = (int(params.get(name, DEFAULTS[name])) for name in ("order", "max_nodes"))
    return list_bytes(device_blocks(limits, order, nodes, {"entries": counts_bytes})) + 3 * ALIGNMENT  # they are three


def kernels(order: int) -> tuple[str, str, str]:
    """Keys of its kernels, in order."""
    return "ngram_clear", f"ngram_observe_order{order}", f"ngram_propose_order{order}"


def on_device(level: Level, info: LevelInfo, device: Device, target: LevelMemory) -> Level:
    """The level that works ahead, if this one would run in Python and the device has an n-gram level's kernels; else the level itself."""
    if type(level) is not NgramLevel or "follow" not in target.programs:
        return level
    ahead = AheadNgramLevel(info, level.index, level.counts)
    return ahead if ahead.take_place(device, target) else level


class AheadNgramLevel(NgramLevel):
    """`NgramLevel`, its states on the device; `take_place` comes first."""

    looks_ahead = True

    def take_place(self, device: Device, target: LevelMemory) -> bool:
        """Allocate, upload the static counts, bind the kernels; False where the device has none. Raises ArtifactError, DeviceError."""
        limits, counts = target.buffers.limits, self.counts
        tables = {"entries": np.array(counts.entries), "kinds": np.array(counts.kinds), "vocab": np.array(counts.vocab)}
        blocks = device_blocks(limits, self.order, self.max_nodes, {name: table.nbytes for name, table in tables.items()})
        blocks |= {name: Block(table.nbytes, "kept", table) for name, table in tables.items()}
        self._tokens, seqs = block_tokens(limits, self.order), limits.max_num_seqs
        at = layout(self._tokens, self.order)
        clear, observe, propose = kernels(self.order)
        found = device.kernel_list(target, blocks, [
            KernelCall(clear, seqs * W.CLEAR_PARTS, ("states", "control", at.words), if_sent=True),
            KernelCall(observe, seqs, (
                "states", "control", "feed", InputArg("followed"), at.words, self._tokens, at.mask, at.pairs, at.journal, at.history)),
            KernelCall(propose, seqs, (
                "states", "control", InputArg("followed"), "entries", "kinds", "vocab", "scratch", "results", at.words, at.mask, at.history,
                counts.slots, counts.order if counts.kinds.any() else -1, self.max_nodes, self.width, self.live_weight,
                self.min_probability))])
        if found is None:
            return False
        self._list: KernelList = found
        words = {name: found.arrays[name].view(np.int32) for name in ("control", "feed", "results")}
        words["control"][:: W.CONTROL] = -1
        self._control, self._feed, self._results = (words[name].data for name in ("control", "feed", "results"))
        self._chances = found.arrays["results"].view(np.float32).data
        self._owners: list[AheadNgramState | None] = [None] * seqs  # of blocks
        self._rows: list[AheadNgramState] = []  # whom the last start was for
        self._asked = 0  # rows of `control` that it set
        self._settled = True  # its results are in the states
        self._starts = 0
        return True

    def start(self) -> LevelState:
        return AheadNgramState(self)

    def ahead(self, states: Sequence[LevelState | None]) -> None:
        self._begin()
        fed = 0
        for seq, state in enumerate(states):
            if state is None:
                self._control[seq * W.CONTROL + W.BLOCK] = -1
            else:
                fed, _ = self._ask(seq, _own(state), fed, follows=1)
                _own(state).begun = True
        self._start(len(states), fed)

    def propose_all(self, states: Sequence[LevelState], budgets: Sequence[int]) -> list[Tree]:
        self.settle()
        mine = [_own(state) for state in states]
        trees = [self._tree(state, budget) for state, budget in zip(mine, budgets, strict=True)]
        late = [i for i, state in enumerate(mine) if not state.begun and not state.current()]  # nobody works ahead for them
        while late:
            self._begin()
            fed, done = 0, set[int]()
            for row, i in enumerate(late[: len(self._owners)]):
                fed, whole = self._ask(row, mine[i], fed, follows=0)
                if whole:
                    done.add(i)
            self._start(min(len(late), len(self._owners)), fed)
            self.settle()
            for i in done:
                trees[i] = self._tree(mine[i], budgets[i])
            late = [i for i in late if i not in done]
        return trees

    def settle(self) -> None:
        """Take over what the last start brought."""
        if self._settled:
            return
        self._list.finish()
        self._settled = True
        results, width = self._results, W.RESULT + 3 * self.max_nodes
        for state in self._rows:
            at = state.row * width
            state.count, state.held, state.last = results[at + W.COUNT], results[at + W.LENGTH], results[at + W.LAST]
            if state.count < 0 or state.stale:
                state.held, state.count = 0, -1

    def _begin(self) -> None:
        """The next start is for nobody yet."""
        self.settle()
        for state in self._rows:
            state.count = -1
        self._rows, self._clears = [], False
        self._starts += 1

    def _ask(self, row: int, state: AheadNgramState, fed: int, *, follows: int) -> tuple[int, bool]:
        """Row `row` of the next start is the state's, its block fed from `fed` of the feed on. Returns its new end; whether all went in."""
        if state.block < 0:
            self._give(state)
        state.used, state.row, state.stale = self._starts, row, False
        tokens = len(state.history)
        if not state.holds_its_own() or tokens - state.forgotten + SCRATCH_SLOTS > self._tokens:
            most = self._tokens - SCRATCH_SLOTS
            state.held, state.forgotten = 0, 0 if tokens <= most else tokens - min(most, self._tokens // 2)
        known = state.forgotten + state.held
        put = min(tokens - known, self._tokens - fed)
        whole = put == tokens - known
        at = row * W.CONTROL
        follows, budget = (follows, self.max_nodes) if whole else (0, 0)
        self._control[at : at + W.SEED + 2] = array("i", (
            state.block, state.held, fed, put, follows, budget, state.coupled, state.forgotten, *state.seed))
        if put:
            self._feed[fed : fed + put] = array("i", state.history[known : known + put])
        self._clears |= not state.held
        self._rows.append(state)
        return fed + put, whole

    def _give(self, state: AheadNgramState) -> None:
        """A block that nobody has, or of whoever used it longest ago: none that the next start is for, since there are as many as rows."""
        owners = self._owners
        block = min(range(len(owners)), key=lambda i: -1 if (owner := owners[i]) is None else owner.used)
        if (owner := owners[block]) is not None:
            owner.block, owner.held, owner.count = -1, 0, -1
        owners[block], state.block, state.held = state, block, 0

    def _start(self, rows: int, fed: int) -> None:
        for row in range(rows, self._asked):
            self._control[row * W.CONTROL + W.BLOCK] = -1
        self._asked, self._settled = rows, False
        self._list.start(4 * max(fed, int(self._clears)))

    def _tree(self, state: AheadNgramState, budget: int) -> Tree:
        """The front of what was proposed, which is what a smaller budget would have proposed; nothing where it is of other tokens."""
        count, nodes = min(state.count, budget), self.max_nodes
        if count <= 0 or not state.current():
            return EMPTY
        at = state.row * (W.RESULT + 3 * nodes) + W.RESULT
        tokens, parents, chances = (view[at + i * nodes : at + i * nodes + count].tolist()
                                    for i, view in enumerate((self._results, self._results, self._chances)))
        return self.tree(tokens, parents, chances)


class AheadNgramState(LevelState):
    """What the host knows of a request's counts on the device. `held` tokens of `history`, from `forgotten` on, lie in block `block`, the
    last of them is `last`. `count` nodes were proposed in row `row` of the last start, -1: none for it."""

    def __init__(self, level: AheadNgramLevel) -> None:
        self.level = level
        self.history: list[int] = []
        self.block = self.row = self.count = self.last = -1
        self.held = self.forgotten = self.used = 0
        self.begun = False  # a step has worked ahead for it
        self.stale = False  # something was rolled back since its block was last asked
        self.coupled, self.seed = 0, (0, 0)

    def observe(self, tokens: Sequence[int]) -> None:
        self.history += tokens

    def propose(self, budget: int) -> Tree:
        return self.level.propose_all([self], [budget])[0]

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > 0:
            del self.history[max(0, len(self.history) - num_tokens) :]
            self.held, self.count, self.stale = 0, -1, True

    def couple(self, draw: Draw) -> None:
        super().couple(draw)
        self.coupled, self.seed = 1, tuple(np.array([draw.seed], np.uint64).view(np.int32).tolist())

    @property
    def prepared(self) -> bool:
        """False: a step works ahead for it, and the next one has its proposal."""
        self.level.settle()
        return not self.begun or self.current()

    def current(self) -> bool:
        """What was proposed comes behind the tokens that it has."""
        return self.count >= 0 and self.forgotten + self.held == len(self.history) and self.holds_its_own()

    def holds_its_own(self) -> bool:
        """The device holds tokens that it has, as far as can be seen."""
        known = self.forgotten + self.held
        return self.held > 0 and known <= len(self.history) and self.history[known - 1] == self.last


def _own(state: LevelState) -> AheadNgramState:
    assert isinstance(state, AheadNgramState)
    return state
