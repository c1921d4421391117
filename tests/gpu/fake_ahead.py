"""The kernels behind a step's choices as the fake driver runs them without an interpreter: by the host's code, at a launch's addresses.

`tests/targets/interpret_ahead.py` holds the kernels themselves to the same code; here thousands of steps take seconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlsdc.runtime import ahead_words as W
from mlsdc.runtime import followed as F
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.cuda import CudaLevel
from mlsdc.runtime.levels.base import LevelState
from mlsdc.runtime.levels.coupling import Draw
from mlsdc.runtime.levels.grown import GROWN_WORDS, GROWTH_WORDS, Growing
from mlsdc.runtime.levels.ngram import NgramLevel, NgramState
from mlsdc.runtime.step import FOLLOWED_WORDS, Header
from tests.gpu.fake_cuda import FakeCuda, Launched


class FakeAhead:
    """`run(launched)`: True if it was one of them."""

    def __init__(self, artifact: Artifact, fake: FakeCuda) -> None:
        self.fake = fake
        target = next(target for target in artifact.manifest.targets if target.device == "cuda")
        self.abi = {key: [entry.split(": ") for entry in info.abi] for key, info in target.kernels.items()}
        info = next((info for info in artifact.manifest.levels if info.kind == "ngram"), None)
        self.level = None if info is None else NgramLevel(info)
        self.blocks: dict[int, NgramState] = {}

    def run(self, launched: Launched) -> bool:
        name = launched.entry.partition("_order")[0].partition("_t")[0]
        if name not in ("follow", "ngram_clear", "ngram_observe", "ngram_propose", "ahead_rows"):
            return False
        getattr(self, name)(launched.grid, Arguments(self, launched))
        return True

    def follow(self, grid: int, a: Arguments) -> None:
        for seq in range(int(a.array("header")[Header.SEQS])):
            words, first, rows = a.array("followed")[seq * FOLLOWED_WORDS :], int(a.array("seq_row")[seq]), int(a.array("seq_rows")[seq])
            out, drafted = int(a.array("seq_out")[seq]), a.array("row_slot")[first] >= 0
            token, word = a.array("tokens")[first : first + rows], a.array("ancestors")[first : first + rows]
            at, path, count = 0, 1, 0
            while out >= 0 and at >= 0:
                choice = words[F.TOKENS + count] = a.array("choices")[out + at]
                words[F.ROWS + count] = first + at
                count += 1
                found = [i for i in range(at + 1, rows) if drafted and token[i] == choice and int(word[i]) == path | 1 << i]
                at = found[0] if found else -1
                path |= 1 << max(at, 0)
            words[: F.ROWS] = count if drafted else rows, count, first, drafted

    def ngram_clear(self, grid: int, a: Arguments) -> None:
        for row in a.rows(grid // W.CLEAR_PARTS):
            if row[W.BASE] == 0:
                assert self.level is not None
                self.blocks[row[W.BLOCK]] = NgramState(self.level)

    def ngram_observe(self, grid: int, a: Arguments) -> None:
        for seq, row in enumerate(a.rows(grid, skip=False)):
            tokens = self.tokens(a, seq, row)
            if row[W.BLOCK] >= 0 and self.holds(row, row[W.BASE]) and row[W.BASE] + len(tokens) <= a.number("room"):
                self.blocks[row[W.BLOCK]].observe(tokens)

    def ngram_propose(self, grid: int, a: Arguments) -> None:
        nodes = a.number("nodes")
        for seq, row in enumerate(a.rows(grid, skip=False)):
            if row[W.BLOCK] < 0:
                continue
            result = a.array("results")[seq * (W.RESULT + 3 * nodes) :]
            brought = self.brought(a, seq, row)
            if not self.holds(row, row[W.BASE] + row[W.FED] + len(brought)):
                result[: W.RESULT] = -1
                continue
            state = self.blocks[row[W.BLOCK]]
            state.seed = None
            if row[W.COUPLED]:
                state.couple(Draw(int(np.array(row[W.SEED : W.SEED + 2], np.int32).view(np.uint64)[0])))
            tree = proposed(state, row[W.BUDGET], row[W.BEFORE])
            result[: W.RESULT] = len(tree), len(state.history), state.history[-1] if state.history else -1, 0
            for i, values in enumerate((tree.tokens, tree.parents, np.exp(np.array(tree.logq)).astype(np.float32).view(np.int32))):
                result[W.RESULT + i * nodes : W.RESULT + i * nodes + len(tree)] = values

    def ahead_rows(self, grid: int, a: Arguments) -> None:
        """Of the rows that levels with programs make, only where they end: what the host compares."""
        for at in range(int(a.array("header")[Header.SEQS])):
            record, grown = a.array("growth")[at * GROWTH_WORDS :], a.array("grown")[at * GROWN_WORDS :]
            words = a.array("followed")[int(record[Growing.OF]) * FOLLOWED_WORDS :]
            count = max(int(words[F.NUM_TOKENS]), 1)
            grown[1], grown[2] = record[Growing.COMMITTED] + count, words[F.TOKENS + count - 1]

    def holds(self, row: list[int], tokens: int) -> bool:
        state = self.blocks.get(row[W.BLOCK])
        return state is not None and len(state.history) == tokens

    def tokens(self, a: Arguments, seq: int, row: list[int]) -> list[int]:
        return a.array("feed")[row[W.FEED] : row[W.FEED] + row[W.FED]].tolist() + self.brought(a, seq, row)

    def brought(self, a: Arguments, seq: int, row: list[int]) -> list[int]:
        words = a.array("followed")[seq * FOLLOWED_WORDS : (seq + 1) * FOLLOWED_WORDS]
        return words[F.TOKENS : F.TOKENS + words[F.NUM_TOKENS]].tolist() if row[W.FOLLOWS] else []


def proposed(state: LevelState, budget: int, before: int) -> Any:
    """A proposal of a state whose tokens come behind `before` others, that the draws count."""
    assert isinstance(state, NgramState)
    drawn = state._drawn
    state._drawn = lambda followers, position: drawn(followers, position + before)  # type: ignore[method-assign]
    try:
        return state.propose(budget)
    finally:
        del state._drawn


def choice(token: Any, position: Any) -> Any:
    """What a `Speaker` chooses after a token at a position."""
    return (token * 5 + 1) % 11 + (position % 9 == 0)


class Speaker:
    """An `execute` of the fake driver: the target's choices are `choice`, whoever draws; what is behind them is done, other kernels are
    not. `level` is to be set to the target's memory."""

    level: CudaLevel

    def __init__(self, artifact: Artifact, fake: FakeCuda) -> None:
        self.fake, self.ahead = fake, FakeAhead(artifact, fake)

    def __call__(self, launched: Launched) -> None:
        if not self.ahead.run(launched) and launched.entry.startswith(("argmax_join", "sample_join")):
            rows = self.at("out_rows")[: self.at("header")[Header.OUT]]
            self.at("choices")[: len(rows)] = choice(self.at("tokens")[rows], self.at("positions")[rows])

    def at(self, name: str) -> Any:
        size = getattr(self.level.buffers, name).nbytes
        return self.fake.block(self.level.inputs + self.level.places[name], size)[:size].view(np.int32)


class Arguments:
    """Of a launch, by name."""

    def __init__(self, ahead: FakeAhead, launched: Launched) -> None:
        self.fake, self.launched = ahead.fake, launched
        self.types = {name: (i, type_) for i, (name, type_) in enumerate(ahead.abi[launched.entry])}

    def number(self, name: str) -> int:
        return int.from_bytes(self.launched.values[self.types[name][0]], "little", signed=True)

    def array(self, name: str) -> Any:
        """From the argument's address to the end of its allocation."""
        i, type_ = self.types[name]
        data = self.fake.block(int.from_bytes(self.launched.values[i], "little"))
        dtype = np.dtype({"*i32": "i4", "*i64": "i8", "*f64": "f8"}[type_] if name != "ancestors" else "u8")
        return data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)

    def rows(self, count: int, *, skip: bool = True) -> list[list[int]]:
        """The rows of `control`; those without a block are left out, if they are to be."""
        words = self.array("control")
        found = [words[i * W.CONTROL : (i + 1) * W.CONTROL].tolist() for i in range(count)]
        return [row for row in found if row[W.BLOCK] >= 0] if skip else found
