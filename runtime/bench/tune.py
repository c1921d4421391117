"""`mlsdc tune`: what a step costs on this machine, what the target accepts of its levels' drafts on given prompts, and the plan from it.

Every position of the prompts' texts is recorded with what the levels propose there. On these texts every way to draft is played out with
measured times (replayed.py); some are then run. Plans and the steps that their predictions are priced with are run in turn, prompt by
prompt and round by round, for a machine is faster in some minutes than in others.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from mlsdc.runtime.bench.everything import Everything
from mlsdc.runtime.bench.prompts import BenchPrompt
from mlsdc.runtime.bench.replayed import (
    CHOSEN,
    FIXED,
    OFF,
    DraftCost,
    Recorded,
    SendBest,
    Texts,
    Times,
    knowing,
    marginal,
    played_out,
    sibling_ranks,
)
from mlsdc.runtime.bench.rig import PlainRig, Rig
from mlsdc.runtime.bench.spec import PLAIN, Side, Swap, run
from mlsdc.runtime.bench.spread import interleave
from mlsdc.runtime.controller import Drafter, Proposal
from mlsdc.runtime.costs import CostTable
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.levels.base import LevelState
from mlsdc.runtime.loading import load_engine
from mlsdc.runtime.native_controller import NativeController
from mlsdc.runtime.plan_file import PlanFile, machine_key
from mlsdc.runtime.sampling_params import Speculation
from mlsdc.runtime.tree import EMPTY, Tree

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32)
CONTEXTS = (128, 768)
SWEPT = (0, 2, 4, 8, 16, 1, 3, 6, 12)  # nodes of a sweep's steps, in turn
FEWEST = 4  # steps of a size whose median is taken
ASKED_AGAIN = 8  # one of so many drafts is timed at other sizes, too
CHECK_ROUNDS = 3
FOLLOWING = 64  # tokens of a text that are kept behind a position


class Listener(Everything):
    """Has everything proposed and sends nothing, so that every position is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tree, int]] = []  # trees and contexts

    def choose(self, proposals: Sequence[Proposal], rows: int, sequences: int, context: int, draft_s: float) -> list[Tree]:
        self.seen += [(proposal.tree, context) for proposal in proposals]
        return [EMPTY for _ in proposals]


class Sweep(SendBest):
    """Sends trees of all sizes in turn, and times whole steps but for asking and choosing, which it times, too."""

    def __init__(self) -> None:
        super().__init__(0)
        self.asking: list[float] = []  # seconds of each time that the levels were asked since the last step, as `timed` measures it
        self.steps: list[tuple[int, int, float]] = []  # rows, context, seconds
        self.choosing: list[float] = []
        self._turn = 0
        self._last: float | None = None
        self._chosen_s = 0.0

    def begin(self) -> None:
        """Another text: what lies between is no step."""
        self._last = None
        self.asking.clear()

    def wish(self, drafter: Drafter, budget: int) -> int:
        return budget

    def choose(self, proposals: Sequence[Proposal], rows: int, sequences: int, context: int, draft_s: float) -> list[Tree]:
        start = time.perf_counter()
        self.nodes = SWEPT[self._turn % len(SWEPT)]
        self._turn += 1
        kept = super().choose(proposals, rows, sequences, context, draft_s)
        self._chosen_s = time.perf_counter() - start
        self.choosing.append(self._chosen_s)
        return kept

    def step(self, rows: int, context: int, seconds: float, nodes: int = 0) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.steps.append((rows, context, now - self._last - self._chosen_s - sum(self.asking)))
        self._last = now
        self.asking.clear()


def tune(path: Path, prompts: Sequence[BenchPrompt], *, threads: int | None = None, device: str = "auto", max_tokens: int = 64,
         rounds: int = 5, check: bool = True, say: Callable[[str], None] = lambda text: None, kernel_file: Path | None = None) -> PlanFile:
    """Measure and plan, with the builds of kernels that `kernel_file` names, by default the file beside the artifact. Raises MlsdcError,
    ArtifactError, RequestError."""
    with PlainRig(path, threads=threads, device=device, kernel_file=kernel_file) as rig:
        say("times of a step")
        table = step_times(rig, rounds)
        machine, sha256 = machine_key(rig.device.name, getattr(rig.device, "threads", None)), rig.artifact.sha256
    # an earlier plan decides nothing, nor is it read
    with load_engine(path, threads=threads, device=device, planned=False, kernel_file=kernel_file) as engine:
        if not engine.drafting.levels:
            raise MlsdcError(f"{path}: has no drafting level: there is nothing to tune")
        names = [level.name for level in engine.manifest.levels]
        levels = names[: len(engine.drafting.levels)]
        say("drafts on the prompts")
        bench = Bench(engine, prompts, max_tokens, table, names)
        full = bench.texts(levels)
        if not any(step.tree for step in full.steps):
            raise MlsdcError(f"{path}: nothing was drafted on these prompts: give longer ones, or more --tokens")
        bench.warm()
        speeds, dropped = played_out(levels, bench.texts, bench.times, names)
        left = [level for level in levels if level not in dropped]
        kept = bench.texts(left) if left else full
        rates = {(rate.level, rate.sampled, rate.depth): rate for texts in (full, kept) for rate in texts.rates(names)}
        ranks = sibling_ranks(full.greedy, names) | sibling_ranks(kept.greedy, names)
        costs = replace(table, draft_s={**marginal(levels, bench.texts), **marginal(left, bench.texts)})
        plan = PlanFile(sha256, machine, costs, 0.0, tuple(rates.values()), tuple(speeds), dropped, ranks, len(prompts), len(full.steps))
        if check:
            say("the plans, run")
            plan = bench.checked(plan, levels)
        context = round(sum(step.context for step in full.steps) / len(full.steps))
        host_s = bench.times.steps.step_s(1, context) + bench.times.plain_s - table.step_s(1, context)
        return replace(plan, host_s=max(0.0, host_s))


class Bench:
    """An engine with its prompts, and what was measured so far."""

    def __init__(self, engine: Engine, prompts: Sequence[BenchPrompt], max_tokens: int, table: CostTable, names: Sequence[str]) -> None:
        self.engine, self.prompts, self.max_tokens, self.table, self.names = engine, prompts, max_tokens, table, names
        self.times = Times(table)
        self._texts: dict[tuple[str, ...], Texts] = {}
        self._whole = Swap("", engine.drafting.level, engine.drafting.controller)

    def texts(self, levels: Sequence[str]) -> Texts:
        """What these levels propose on the prompts' texts: every position, greedily, and of every other prompt at temperature 0.7."""
        found = self._texts.get(tuple(levels))
        if found is None:
            asking: dict[int, list[float]] = defaultdict(list)
            steps: list[Recorded] = []
            with timed(self.engine, asking):
                for i, prompt in enumerate(self.prompts):
                    steps += self._listened(prompt, levels, 2 * i, 0.0)
                    if i % 2:
                        steps += self._listened(prompt, levels, 2 * i + 1, 0.7)
            sizes = sorted(asking)
            found = self._texts[tuple(levels)] = Texts(steps, DraftCost(tuple(sizes), tuple(median(asking[size]) for size in sizes)))
        return found

    def _listened(self, prompt: BenchPrompt, levels: Sequence[str], number: int, temperature: float) -> Iterator[Recorded]:
        listener = Listener()
        self.engine.drafting.controller = listener
        (tokens,) = run(self.engine, [prompt.prompt], Speculation(levels=tuple(levels)), self.max_tokens, temperature, number, Side())
        for at, (tree, context) in enumerate(listener.seen, 1):  # the first token comes with the prompt
            yield Recorded(number, tree, context, tuple(tokens[at : at + FOLLOWING]), temperature > 0)

    def warm(self) -> None:
        """Times to begin with, and what a plain step takes less than one whose levels are asked."""
        sweep, plain = Sweep(), Side()
        for prompt in self.prompts:
            self._swept(sweep, prompt)
            run(self.engine, [prompt.prompt], PLAIN, self.max_tokens, 0.0, 0, plain)
        context = round(sum(context for _, context, _ in sweep.steps) / max(1, len(sweep.steps)))
        steps = whole_steps(self.table, sweep.steps)
        plain_s = (sum(plain.seconds) - sum(plain.stalled)) / max(1, plain.tokens)
        choose_s = median(sweep.choosing) if sweep.choosing else 0.0
        native = isinstance(self._whole.controller, NativeController)  # that takes next to nothing
        self.times = Times(steps, plain_s - steps.step_s(1, context), choose_s, 0.0 if native else choose_s)

    def _swept(self, sweep: Sweep, prompt: BenchPrompt) -> None:
        self._whole.use(self.engine)
        self.engine.drafting.controller = sweep
        sweep.begin()
        with timed(self.engine, None, sweep.asking):
            run(self.engine, [prompt.prompt], None, self.max_tokens, 0.0, 0, Side())

    def checked(self, plan: PlanFile, levels: Sequence[str]) -> PlanFile:
        """The plan with predictions from steps that were timed in turn with the plans, which are run."""
        swaps = self._swaps(plan, levels)
        sides: dict[tuple[str, int], list[Side]] = defaultdict(list)
        sweep = Sweep()
        for turn in range(CHECK_ROUNDS):
            for i, prompt in enumerate(self.prompts):
                self._swept(sweep, prompt)
                for name in [*swaps][:: 1 if turn % 2 else -1]:
                    side = Side()
                    swaps[name].use(self.engine)
                    run(self.engine, [prompt.prompt], PLAIN if name == OFF else None, self.max_tokens, 0.0, 0, side)
                    sides[name, i].append(side)
        self.times = replace(self.times, steps=whole_steps(self.table, sweep.steps))
        self._whole.use(self.engine)  # texts of other levels may be wanted
        speeds, _ = played_out(levels, self.texts, self.times, self.names, plan.dropped)
        found = {speed.name: speed for speed in speeds}
        return replace(plan, speeds=tuple(
            replace(found.get(speed.name, speed), measured=_speed([sides[speed.name, i] for i in range(len(self.prompts))])
                    if speed.name in swaps else None) for speed in plan.speeds))

    def _swaps(self, plan: PlanFile, levels: Sequence[str]) -> dict[str, Swap]:
        """How the engine runs each of the plans."""
        drafting, swaps = self.engine.drafting, dict[str, Swap]()
        for speed in plan.speeds:
            fixed = next((nodes for nodes in FIXED if speed.name == f"always {nodes} nodes"), 0)
            if speed.name == CHOSEN:
                drafting.take(plan, "tuning")
                swaps[speed.name] = Swap("", drafting.level, drafting.controller)
            elif fixed or speed.name == OFF:
                swaps[speed.name] = Swap("", self._whole.level, knowing(SendBest(fixed), self.texts(levels).rates(self.names), self.names))
        return swaps


def _speed(sides: Sequence[Sequence[Side]]) -> float:
    """Of all prompts, from the median round of each; stalls are not the plan's."""
    tokens = sum(rounds[0].tokens for rounds in sides)
    return tokens / max(1e-9, sum(median(side.seconds[-1] - side.stalled[-1] for side in rounds) for rounds in sides))


@contextmanager
def timed(engine: Engine, by_size: dict[int, list[float]] | None, all_of_them: list[float] | None = None) -> Iterator[None]:
    """Time how long the levels take to propose: `all_of_them` always; `by_size` by nodes asked for, now and then at other sizes, too."""
    level = engine.drafting.level
    assert level is not None
    propose, calls = level.propose_all, 0

    def seconds(states: Sequence[LevelState], budgets: Sequence[int]) -> tuple[list[Tree], float]:
        start = time.perf_counter()
        trees = propose(states, budgets)
        return trees, time.perf_counter() - start

    def propose_all(states: Sequence[LevelState], budgets: Sequence[int]) -> list[Tree]:
        nonlocal calls
        trees, took = seconds(states, budgets)
        if all_of_them is not None:
            all_of_them.append(took)
        if by_size is not None and states:
            by_size[max(budgets)].append(took / len(states))
            calls += 1
            if calls % ASKED_AGAIN == 0:
                for size in FIXED:
                    if size < max(budgets):
                        by_size[size].append(seconds(states, [size] * len(states))[1] / len(states))
        return trees

    level.propose_all = propose_all  # type: ignore[method-assign]
    try:
        yield
    finally:
        del level.propose_all


def whole_steps(table: CostTable, steps: Sequence[tuple[int, int, float]]) -> CostTable:
    """`table`, of the target's program alone, as whole steps (rows, context, seconds) of an engine took: each size as much longer as its
    median step, sizes in between as their neighbours."""
    ratios: dict[int, list[float]] = defaultdict(list)
    for rows, context, seconds in steps:
        ratios[rows].append(seconds / table.step_s(rows, context))
    known = sorted(rows for rows, found in ratios.items() if len(found) >= FEWEST)
    if not known:
        return table
    factors = np.interp(table.rows, known, [median(ratios[rows]) for rows in known])
    return replace(table, seconds=tuple(tuple(float(s * f) for s, f in zip(line, factors, strict=True)) for line in table.seconds))


def step_times(rig: Rig, rounds: int) -> CostTable:
    """Medians of interleaved rounds of the target's program alone."""
    limits = rig.limits
    most = min(limits.max_tree_nodes + 1, limits.max_logit_rows)
    rows = tuple(n for n in ROWS if n <= most) or (1,)
    contexts = tuple(c for c in CONTEXTS if c + most <= limits.max_model_len) or (max(1, limits.max_model_len - most - 1),)
    rig.fill(max(contexts))

    def case(context: int, count: int) -> Callable[[], float]:
        def seconds() -> float:
            rig.set_rows(context, count, drafted=count > 1)
            return rig.seconds(3)
        return seconds

    found = interleave({f"{c} {n}": case(c, n) for c in contexts for n in rows}, rounds)
    lines = tuple(rising([median(found[f"{c} {n}"]) for n in rows]) for c in contexts)
    return CostTable(contexts, rows, lines, {})


def rising(values: Sequence[float]) -> tuple[float, ...]:
    """The nearest values that never fall: noise must not say that more rows are cheaper (neighbours that do are replaced by their mean)."""
    blocks: list[list[float]] = []  # mean, how many
    for value in values:
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count = blocks.pop()
            blocks[-1] = [(blocks[-1][0] * blocks[-1][1] + mean * count) / (blocks[-1][1] + count), blocks[-1][1] + count]
    return tuple(mean for mean, count in blocks for _ in range(int(count)))
