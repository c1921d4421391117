"""Trees that grow by `grow`, through Triton's interpreter, against those that grow on the host: `python -m tests.targets.interpret_grow`.

What a row guesses is a function of its token, its ancestors and what it starts from; both ways see the same step inputs. Raises
AssertionError where a tree differs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mlsdc.runtime.device.base import BoundProgram
from mlsdc.runtime.followed import NUM_ROWS, NUM_TOKENS, ROWS, TOKENS
from mlsdc.runtime.kv_pool import PageTable
from mlsdc.runtime.levels.base import LevelState, finished
from mlsdc.runtime.levels.coupling import Draw, Draws, coupled
from mlsdc.runtime.levels.growing import GrowingLevel, Growth, Row, log_guesses
from mlsdc.runtime.levels.grown import CHILDREN, Growing, grown_widths, write_record
from mlsdc.runtime.program import ArenaArg, InputArg, ProgramSpec, Tap
from mlsdc.runtime.step import Array, Header, Limits, StepBuffers
from mlsdc.runtime.tree import Tree
from mlsdc.targets.nvidia_grow import AHEAD_INPUTS, grow_call
from mlsdc.targets.protocol import KernelSpec
from mlsdc.targets.triton_build import load_source, render
from mlsdc.targets.triton_interpreter import interpret
from mlsdc.templates.params_triton_grow import AheadRows, BringRows

LIMITS = Limits(max_model_len=64, max_num_seqs=3, max_num_batched_tokens=24, max_logit_rows=24, max_tree_nodes=40)
WIDTH, VOCAB = 24, 50
TYPES = {"f4": torch.float32, "f8": torch.float64, "i4": torch.int32, "i8": torch.int64, "u8": torch.int64}


class Model:
    """Guesses of rows, which lie in `slots` scratch slots. `sharp`: how much likelier the first one is than the next."""

    def __init__(self, buffers: StepBuffers, sharp: float, vocab: int, slots: int) -> None:
        self.buffers, self.sharp, self.vocab, self.slots = buffers, sharp, vocab, slots
        self.top = np.zeros((LIMITS.max_logit_rows, 2 * CHILDREN + 1), np.float32)
        self.hidden = np.zeros((LIMITS.max_num_batched_tokens, WIDTH), np.float32)

    def run(self) -> None:
        b = self.buffers
        rows, out = int(b.header[Header.ROWS]), int(b.header[Header.OUT])
        assert (b.row_slot[:rows] < self.slots).all()  # the next one is another sequence's
        for row in range(rows):
            noise = np.random.default_rng([int(b.tokens[row]), int(b.positions[row]), int(b.ancestors[row]),
                                           int(b.features[row].view(np.uint32).sum()) if b.features.size else 0])
            self.hidden[row] = noise.standard_normal(WIDTH)
        for i, row in enumerate(b.out_rows[:out]):
            noise = np.random.default_rng(self.hidden[row].view(np.uint32).tolist())
            steps = np.cumsum(np.concatenate([[0], noise.exponential(self.sharp, CHILDREN - 1)])).astype(np.float32)
            self.top[i, :CHILDREN] = -steps
            self.top[i, CHILDREN : 2 * CHILDREN] = noise.permutation(self.vocab)[:CHILDREN]
            self.top[i, -1] = np.exp(-steps.astype(np.float64)).sum() * 1.1


class Draft(BoundProgram):
    """One run of the model."""

    def __init__(self, model: Model) -> None:
        self.name, self.model = "draft", model

    def run(self) -> None:
        self.model.run()

    def tap(self, name: str) -> Array:
        found: Array = getattr(self.model, name)
        return found

    def profile(self) -> list[tuple[str, str, float]]:
        return []


class Trees(Draft):
    """All rounds: the model, and the kernel after it."""

    def __init__(self, model: Model, level: Grower, function: Any, names: Sequence[str]) -> None:
        super().__init__(model)
        self.level, self.function, self.names = level, function, names

    def run(self) -> None:
        b = self.model.buffers
        for at in range(self.level.depth):
            self.model.run()
            whole = {"top_ptr": self.model.top, "hidden_ptr": self.model.hidden}
            arrays = [whole[name] if name in whole else getattr(b, name) for name in self.names]
            args = [torch.from_numpy(a.reshape(-1).view(np.int64) if a.dtype == np.uint64 else a.reshape(-1)) for a in arrays]
            interpret(self.function, LIMITS.max_num_seqs, [*args, at, self.level.depth])


class Grower(GrowingLevel):
    """A level whose first row is the last token's, in a page or, with `root`, in scratch."""

    kind, name, index = "test", "grower", 1

    def __init__(self, depth: int, floor: float, features: bool, ids: Array | None, own_ids: bool) -> None:
        self.depth, self.floor, self.has_features, self.ids = depth, floor, features, ids
        self.vocab_size = VOCAB - 3
        self.draws = Draws()
        if own_ids and ids is not None:
            self.own_ids = np.zeros(int(ids.max()) + 1, np.int32)
            self.own_ids[ids] = np.arange(len(ids), dtype=np.int32)

    def start(self) -> LevelState:
        raise AssertionError("no request begins here")

    def attach(self, model: Model, function: Any, names: Sequence[str], most_rows: int, *, there: bool) -> None:
        self.buffers, self.program = model.buffers, Draft(model)
        self.most_rows, self.most_slots = most_rows, model.slots
        self.trees = Trees(model, self, function, names) if there else None
        if self.ids is not None:
            self.buffers.draft_ids[:] = self.ids

    def grow_all(self, growths: Sequence[Growth], lasts: Sequence[int]) -> list[Tree]:
        """As the levels do: with `root` the last token's row lies in slot 0, else its keys go to a page."""
        there = self.trees is not None
        feature = np.ones(WIDTH, np.float32) if self.has_features else None
        if growths[0].root:
            work = [(growth, [Row(last, 0, feature)]) for growth, last in zip(growths, lasts, strict=True)]
            words, turns = self.write(work)
            firsts = [word for (word,) in words]
        else:
            for seq, (growth, last) in enumerate(zip(growths, lasts, strict=True)):
                b = self.buffers
                b.tokens[seq], b.positions[seq], b.row_slot[seq], b.ancestors[seq] = self.spoken([last])[0], growth.committed - 1, -1, 0
                if feature is not None:
                    b.features[seq] = feature
                self.sequence(seq, growth.table, seq, 1, growth.committed - 1)
            self.buffers.out_rows[: len(growths)] = range(len(growths))
            firsts, turns = [0] * len(growths), [growth.committed - 1 + growth.shift for growth in growths]
        if there:
            assert self.grows_there(len(growths), len(growths))
            return finished(self.grown(growths, turns, [self.spoken([last])[0] for last in lasts], len(growths)))
        self.begin_run(len(growths), len(growths), len(growths))
        logp, tokens = coupled(*log_guesses(self.program.tap("top")[: len(growths)], self.ids, self.vocab_size), [g.draw for g in growths],
                               turns, self.draws)
        hidden = self.program.tap("hidden").copy()
        for seq, growth in enumerate(growths):
            growth.add(-1, logp[seq], tokens[seq], hidden[seq] if self.has_features else None, firsts[seq], self.log_floor)
        finished(self.grow(growths, self.depth - 1))
        return [growth.tree(self.index) for growth in growths]


class Kernels:
    """The rendered kernel of each kind of level."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[tuple[bool, int, bool], tuple[Any, list[str]]] = {}

    def of(self, features: bool, ids: int, own_ids: bool) -> tuple[Any, list[str]]:
        key = features, ids, own_ids
        if key not in self.found:
            taps = {"top": Tap(0, "f4", (24, 2 * CHILDREN + 1))} | ({"hidden": Tap(64, "f4", (24, WIDTH))} if features else {})
            level = Level_("model" if own_ids else "eagle", {"widths": {"draft_ids": ids}} if ids else {})
            call = grow_call(level, ProgramSpec("draft", "level", 0, (), taps), LIMITS, VOCAB - 3)  # type: ignore[arg-type]
            assert call is not None
            path = self.folder / f"{call.spec.key}.py"
            path.write_text(render(call.spec))
            named = {ArenaArg(0): "top_ptr", ArenaArg(64): "hidden_ptr"}
            names = [arg.input if isinstance(arg, InputArg) else named[arg] for arg in call.args]  # type: ignore[index]
            self.found[key] = load_source(path, call.spec.key), names
        return self.found[key]


class Level_:
    """What `grow_call` asks of a compiled level."""

    def __init__(self, kind: str, params: dict[str, Any]) -> None:
        self.kind, self.params = kind, params


@st.composite
def draws(draw: st.DrawFn) -> Draw | None:
    if draw(st.booleans()):
        return None
    return Draw(draw(st.integers(0, 2**64 - 1)), draw(st.sampled_from([0.3, 1.0, 1.7])), draw(st.sampled_from([0, 1, 3])),
                draw(st.sampled_from([1.0, 0.6])), draw(st.sampled_from([0.0, 0.2])))


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[Growth, int]]:
    root = draw(st.sampled_from([0, 1]))
    return [(Growth(PageTable([1], scratch=[0, 1, 2]), draw(st.integers(1, 12)), draw(st.integers(1, 40)), root, draw(draws()), 2),
             draw(st.integers(0, 9))) for _ in range(draw(st.integers(1, 3)))]


def check(kernels: Kernels) -> None:
    # without shrinking: a run of the interpreter takes a tenth of a second
    @settings(max_examples=int(os.environ.get("GROW_EXAMPLES", 25)), phases=[Phase.generate], deadline=None, derandomize=True,
              database=None, suppress_health_check=list(HealthCheck))
    @given(requests(), st.integers(1, 4), st.sampled_from([0.0, 0.01, 0.2]), st.booleans(), st.sampled_from(["same", "mapped", "spoken"]),
           st.sampled_from([0.2, 0.7, 2.0]), st.sampled_from([4, 13, LIMITS.max_num_batched_tokens]),
           st.sampled_from([2, 9, 41]))
    def same(work: list[tuple[Growth, int]], depth: int, floor: float, features: bool, ids: str, sharp: float, most_rows: int, slots: int
             ) -> None:
        table = None if ids == "same" else np.random.default_rng(7).permutation(VOCAB).astype(np.int32)[:40]
        function, names = kernels.of(features, 0 if table is None else len(table), ids == "spoken")
        found = []
        for there in (False, True):
            widths = {"features": WIDTH, "draft_ids": 0 if table is None else len(table)} if features else (
                {} if table is None else {"draft_ids": len(table)})
            buffers = StepBuffers(LIMITS, 16, {**widths, **grown_widths(widths, {"nodes", "rows_hidden"} if features else {"nodes"})})
            level = Grower(depth, floor, features, table, ids == "spoken")
            level.attach(Model(buffers, sharp, VOCAB if table is None else len(table), slots), function, names, most_rows, there=there)
            fresh = [Growth(g.table, g.committed, g.budget, g.root, g.draw, g.shift) for g, _ in work]
            lasts = [last if table is None or ids == "mapped" else int(table[last]) for _, last in work]
            found.append(level.grow_all(fresh, lasts))
        host, device = found
        for i, (a, b) in enumerate(zip(host, device, strict=True)):
            assert (a.tokens, a.parents) == (b.tokens, b.parents), (i, a, b)
            assert np.allclose(a.logq, b.logq, rtol=1e-5, atol=1e-6), (i, a.logq, b.logq)

    same()


def check_ahead(folder: Path, taps: int, last_only: bool, noise: np.random.Generator) -> None:
    """Rows of three sequences behind a step of four, of which 1, 3 and 2 rows are committed; 4 are kept for each."""
    widths = {"features": taps * WIDTH, **grown_widths({"features": taps * WIDTH}, ())}
    buffers, target = StepBuffers(LIMITS, 16, widths), StepBuffers(replace(LIMITS, max_num_seqs=4), 16)
    hidden = noise.standard_normal((taps, LIMITS.max_num_batched_tokens, WIDTH), np.float32)
    counts, of, committed = [1, 3, 2], [2, 0, 3], [5, 11, 7]
    paths = [[int(row) for row in np.sort(noise.permutation(24)[:count])] for count in counts]
    tokens = [noise.integers(0, VOCAB, count).tolist() for count in counts]
    room = 1 if last_only else 4
    buffers.header[Header.SEQS] = 3
    for seq in range(3):
        step = target.followed[of[seq]]
        step[NUM_ROWS] = step[NUM_TOKENS] = counts[seq]
        step[ROWS : ROWS + counts[seq]], step[TOKENS : TOKENS + counts[seq]] = paths[seq], tokens[seq]
        write_record(buffers.growth[seq], {Growing.OF: of[seq], Growing.FIRST: seq * room, Growing.ROOM: room,
                                           Growing.COMMITTED: committed[seq], Growing.TURN: 30}, None)
    params = AheadRows(taps, WIDTH, last_only)
    names = [*(["features"] if taps else []), *AHEAD_INPUTS]
    path = folder / f"{params.key}.py"
    path.write_text(render(KernelSpec(params.template, params, ())))
    arrays = [getattr(buffers, name) for name in names]
    arrays.insert(1 if taps else 0, target.followed)
    args = [torch.from_numpy(a.reshape(-1).view(np.int64) if a.dtype == np.uint64 else a.reshape(-1)) for a in [*hidden, *arrays]]
    interpret(load_source(path, params.key), LIMITS.max_num_seqs, args)
    for seq in range(3):
        count, first = counts[seq], seq * room
        which = [count - 1] if last_only else list(range(count))
        rows = slice(first, first + len(which))
        assert buffers.tokens[rows].tolist() == [tokens[seq][i] for i in which]
        assert buffers.positions[rows].tolist() == [committed[seq] + i for i in which]
        assert buffers.row_slot[rows].tolist() == [-1] * len(which)
        assert buffers.row_slot[first + len(which) : first + room].tolist() == [0] * (room - len(which))
        assert buffers.row_seq[first : first + room].tolist() == [seq] * room
        for row, i in zip(range(first, first + len(which)), which, strict=True):
            assert np.array_equal(buffers.features[row], hidden[:, paths[seq][i]].reshape(-1))
        assert (buffers.seq_row[seq], buffers.seq_rows[seq], buffers.out_rows[seq]) == (first, len(which), first + len(which) - 1)
        assert buffers.grown[seq, 1:3].tolist() == [committed[seq] + count, tokens[seq][-1]]
        assert buffers.growth[seq, [Growing.COMMITTED, Growing.TURN, Growing.LAST]].tolist() == [
            committed[seq] + count, 30 + count, tokens[seq][-1]]


def check_bring(folder: Path) -> None:
    spec = BringRows(300)
    path = folder / f"{spec.key}.py"
    path.write_text(render(KernelSpec(spec.template, spec, ())))
    x, y = torch.randn(4, 300), torch.zeros(4, 300)
    interpret(load_source(path, spec.key), 4, [x.reshape(-1), torch.tensor([3]), y.reshape(-1)])
    assert torch.equal(y[:3], x[:3])
    assert not y[3].any()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        check(Kernels(Path(folder)))
        for taps, last_only in ((1, False), (3, False), (0, False), (2, True)):
            check_ahead(Path(folder), taps, last_only, np.random.default_rng(taps))
        check_bring(Path(folder))
    print("all as the host grows them")
