"""`mlsdc tune`: what a step costs on this machine, what the target accepts of its levels' drafts on given prompts, and the plan from it.

Survival is counted in runs that verify everything that is proposed. On the recorded steps every way to draft is played out with the
measured times; some of them are then run, so that predictions stand beside measurements.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from statistics import median
from typing import Any

from mlsdc.runtime.bench.prompts import BenchPrompt
from mlsdc.runtime.bench.rig import Rig
from mlsdc.runtime.bench.spec import PLAIN, Side, run
from mlsdc.runtime.bench.spread import interleave
from mlsdc.runtime.controller import Controller, Drafter, Proposal
from mlsdc.runtime.costs import Costs, CostTable
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.plan_file import PlanFile, PlanSpeed, Rate, machine_key
from mlsdc.runtime.tree import Tree

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32)
CONTEXTS = (128, 768)
FIXED = (2, 4, 8, 16)  # sizes of trees that are played out, and run, beside the chosen plan
PAYS = 1.05
RANKS = 6


@dataclass(frozen=True)
class Recorded:
    """A step of a run that verified everything: the request, its tree, the context, and the tokens that came."""

    request: int
    tree: Tree
    context: int
    committed: tuple[int, ...]
    sampled: bool


class SendAll(Controller):
    """Verifies everything, and keeps what came of it."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Recorded] = []
        self.context = 0

    def room(self, rows: int, sequences: int, context: int) -> int:
        return 64

    def wish(self, drafter: Drafter, budget: int) -> int:
        return budget

    def choose(self, proposals: Sequence[Proposal], rows: int, sequences: int, context: int, draft_s: float) -> list[Tree]:
        self.context = context
        return [proposal.tree for proposal in proposals]

    def learn(self, proposal: Proposal, committed: Sequence[int]) -> None:
        self.recorded.append(Recorded(proposal.drafter.id, proposal.tree, self.context, tuple(committed), proposal.sampled))


class SendBest(Controller):
    """Always the likeliest `nodes` nodes."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.nodes = nodes

    def room(self, rows: int, sequences: int, context: int) -> int:
        return 64

    def wish(self, drafter: Drafter, budget: int) -> int:
        return min(budget, self.nodes)

    def choose(self, proposals: Sequence[Proposal], rows: int, sequences: int, context: int, draft_s: float) -> list[Tree]:
        return [likeliest(proposal.tree, self.chances(proposal), self.nodes) for proposal in proposals]


class Measured(Costs):
    """Times that were measured and are not corrected."""

    def learn(self, rows: int, context: int, seconds: float, *, drafted: bool = False) -> None:
        pass

    def stale(self, rows: int) -> bool:
        return False


def likeliest(tree: Tree, chances: Sequence[float], nodes: int) -> Tree:
    return tree.select(sorted(range(len(tree)), key=lambda node: (-chances[node], node))[:nodes])


def tune(path: Path, prompts: Sequence[BenchPrompt], *, threads: int | None = None, device: str = "auto", max_tokens: int = 64,
         rounds: int = 5, check: bool = True, say: Callable[[str], None] = lambda text: None) -> PlanFile:
    """Measure and plan. Raises MlsdcError, ArtifactError, RequestError."""
    with Rig(path, threads=threads, device=device) as rig:
        say("times of a step")
        table = step_times(rig, rounds)
        machine, sha256 = machine_key(rig.device.name, getattr(rig.device, "threads", None)), rig.artifact.sha256
    with Engine.load(path, threads=threads, device=device) as engine:
        if not engine.drafting.levels:
            raise MlsdcError(f"{path}: has no drafting level: there is nothing to tune")
        engine.drafting.take(None, "tuning")  # every level, whatever an earlier plan has left out
        names = [level.name for level in engine.manifest.levels]
        say("drafts on the prompts")
        draft_s = timed_levels(engine)
        recorder = SendAll()
        engine.drafting.controller = recorder
        plain = Side()
        for i, prompt in enumerate(prompts):
            run(engine, [prompt.prompt], PLAIN, max_tokens, 0.0, 0, plain)
            run(engine, [prompt.prompt], None, max_tokens, 0.0, 0, Side())
            if i % 2:
                run(engine, [prompt.prompt], None, max_tokens, 0.7, i, Side())
        steps = recorder.recorded
        if not steps:
            raise MlsdcError(f"{path}: no draft was verified on these prompts: give longer ones, or more --tokens")
        context = round(sum(step.context for step in steps) / len(steps))
        host_s = max(0.0, sum(plain.seconds) / max(1, plain.tokens) - table.step_s(1, context))
        drafts = {name: median(seconds) if seconds else 0.0 for name, seconds in draft_s.items()}
        table = replace(table, draft_s=drafts)
        rates = tuple(survival(steps, names))
        greedy = [step for step in steps if not step.sampled]
        speeds, dropped = played_out(greedy, table, host_s, names, rates)
        if check:
            say("the plans, run")
            speeds = measured(engine, prompts, speeds, table, rates, names, max_tokens)
        return PlanFile(sha256, machine, table, host_s, rates, tuple(speeds), dropped, sibling_ranks(greedy, names),
                        len(prompts), sum(len(s.committed) for s in steps))


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


def timed_levels(engine: Engine) -> dict[str, list[float]]:
    """From now on every draft of every level is timed, seconds a request."""
    found: dict[str, list[float]] = {}
    for level in engine.drafting.levels:
        seconds = found[level.name] = []
        level.propose_all = timed(level.propose_all, seconds)  # type: ignore[method-assign]
    return found


def timed(propose: Any, seconds: list[float]) -> Any:
    def propose_all(states: Sequence[Any], budgets: Sequence[int]) -> list[Tree]:
        start = time.perf_counter()
        trees: list[Tree] = propose(states, budgets)
        seconds.append((time.perf_counter() - start) / max(1, len(states)))
        return trees
    return propose_all


def survival(steps: Sequence[Recorded], names: Sequence[str]) -> Iterator[Rate]:
    """Rates by level, depth and way of choosing."""
    sums: dict[tuple[bool, str, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for step in steps:
        for depth, (masses, hit) in enumerate(outcomes(step), 1):
            for level, mass in masses.items():
                found = sums[step.sampled, names[level], depth]
                found[0] += 1
                found[1] += min(1.0, mass)
                found[2] += level == hit
    for (sampled, name, depth), (count, mass, hits) in sorted(sums.items()):
        yield Rate(name, depth, sampled, int(count), mass / count, hits / count)


def sibling_ranks(steps: Sequence[Recorded], names: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Level -> chance that its b-th likeliest child of a node that was right is right, b = 1 .. RANKS."""
    hits: dict[int, list[int]] = defaultdict(lambda: [0] * RANKS)
    counts: dict[int, int] = defaultdict(int)
    for step in steps:
        at, tree = -1, step.tree
        for token in step.committed:
            children = [node for node, parent in enumerate(tree.parents) if parent == at]
            of_level: dict[int, list[int]] = defaultdict(list)
            for node in sorted(children, key=lambda node: -tree.logq[node] if tree.logq else 0.0):
                of_level[tree.levels[node] if tree.levels else 0].append(node)
            for level, nodes in of_level.items():
                counts[level] += 1
                for rank, node in enumerate(nodes[:RANKS]):
                    hits[level][rank] += tree.tokens[node] == token
            after = next((node for node in children if tree.tokens[node] == token), None)
            if after is None:
                break
            at = after
    return {names[level]: tuple(hit / counts[level] for hit in hits[level]) for level in sorted(counts)}


def outcomes(step: Recorded) -> Iterator[tuple[dict[int, float], int]]:
    """By depth along the committed path: the probability each level gave its nodes there, and whose node was chosen (-1: none)."""
    at, tree = -1, step.tree
    for token in step.committed:
        masses: dict[int, float] = {}
        hit, after = -1, None
        for node, parent in enumerate(tree.parents):
            if parent != at:
                continue
            level = tree.levels[node] if tree.levels else 0
            masses[level] = masses.get(level, 0.0) + (exp(min(0.0, tree.logq[node])) if tree.logq else 1.0)
            if tree.tokens[node] == token and after is None:
                hit, after = level, node
        if not masses:
            return
        yield masses, hit
        if after is None:
            return
        at = after


def accepted(tree: Tree, committed: Sequence[int]) -> int:
    """Nodes of a tree that the committed tokens run through."""
    at, count = -1, 0
    for token in committed:
        after = next((node for node, parent in enumerate(tree.parents) if parent == at and tree.tokens[node] == token), None)
        if after is None:
            return count
        at, count = after, count + 1
    return count


def played_out(steps: Sequence[Recorded], table: CostTable, host_s: float, names: Sequence[str], rates: Sequence[Rate]
               ) -> tuple[list[PlanSpeed], dict[str, str]]:
    """Predicted speeds of all plans, the chosen one first, and the levels that do not pay 5 %."""
    levels = sorted({level for step in steps for level in step.tree.levels or (0,)})
    cost_of = {level: table.draft_s.get(names[level], 0.0) for level in levels}

    def dynamic(kept: Sequence[int]) -> PlanSpeed:
        draft_s = sum(cost_of[level] for level in kept)
        name = "chosen by the controller" if len(kept) == len(levels) else f"only {', '.join(names[level] for level in kept)}"
        return play(name, [replace(step, tree=of_levels(step.tree, kept)) for step in steps], table, host_s, draft_s,
                    controller(table, rates, names))

    speeds = [PlanSpeed("off", *plain_speed(steps, table, host_s))]
    chosen = dynamic(levels)
    dropped: dict[str, str] = {}
    kept = list(levels)
    for level in sorted(levels, key=lambda x: -cost_of[x]):
        rest = [other for other in kept if other != level]
        without = dynamic(rest) if rest else speeds[0]
        if chosen.predicted < PAYS * without.predicted:
            gain = 100 * (chosen.predicted / without.predicted - 1)
            dropped[names[level]] = f"brings {gain:.1f} % over {'the others' if rest else 'plain decoding'}; 5 % is the least that pays"
            kept = rest
            chosen = replace(without, name="chosen by the controller")
        elif rest:
            speeds.append(without)
    draft_s = sum(cost_of[level] for level in levels)
    for nodes in FIXED:
        if any(len(step.tree) >= nodes for step in steps):
            speeds.append(play(f"always {nodes} nodes", steps, table, host_s, draft_s, best(nodes, rates, names)))
    return [chosen, *speeds], dropped


def of_levels(tree: Tree, levels: Sequence[int]) -> Tree:
    """The nodes of these levels whose parents are of them, too."""
    kept: list[int] = []
    inside = {-1}
    for node, parent in enumerate(tree.parents):
        if parent in inside and (tree.levels[node] if tree.levels else 0) in levels:
            inside.add(node)
            kept.append(node)
    return tree.select(kept)


def plain_speed(steps: Sequence[Recorded], table: CostTable, host_s: float) -> tuple[float, None, float]:
    context = round(sum(step.context for step in steps) / len(steps))
    return 1 / (table.step_s(1, context) + host_s), None, 1.0


def controller(table: CostTable, rates: Sequence[Rate], names: Sequence[str]) -> Controller:
    made = Controller(Measured(table))
    made.know(rates, names)
    return made


def best(nodes: int, rates: Sequence[Rate], names: Sequence[str]) -> Controller:
    made = SendBest(nodes)
    made.know(rates, names)
    return made


def play(name: str, steps: Sequence[Recorded], table: CostTable, host_s: float, draft_s: float, chooser: Controller) -> PlanSpeed:
    """The recorded steps with what `chooser` would have sent of their trees."""
    drafters: dict[int, Drafter] = {}
    wishes: dict[int, int] = {}
    tokens = seconds = 0.0
    for step in steps:
        drafter = drafters.setdefault(step.request, Drafter(step.request))
        sent = Tree()
        if wishes.get(step.request, 64):
            proposal = Proposal(drafter, step.tree, step.sampled)
            (sent,) = chooser.choose([proposal], 1, 1, step.context, draft_s)
            chooser.learn(proposal, step.committed)
            seconds += draft_s
        wishes[step.request] = chooser.wish(drafter, max(1, len(step.tree)))
        tokens += 1 + accepted(sent, step.committed)
        seconds += table.step_s(1 + len(sent), step.context) + host_s
    return PlanSpeed(name, tokens / seconds, None, tokens / len(steps))


def measured(engine: Engine, prompts: Sequence[BenchPrompt], speeds: Sequence[PlanSpeed], table: CostTable, rates: Sequence[Rate],
             names: Sequence[str], max_tokens: int) -> list[PlanSpeed]:
    """The plans that this engine can run, prompt by prompt in turn."""
    choosers: dict[str, Controller | None] = {"off": None, "chosen by the controller": controller(table, rates, names)}
    choosers |= {f"always {nodes} nodes": best(nodes, rates, names) for nodes in FIXED}
    sides = {speed.name: Side() for speed in speeds if speed.name in choosers}
    for prompt in prompts:
        for name, side in sides.items():
            chooser = choosers[name]
            if chooser is not None:
                engine.drafting.controller = chooser
            run(engine, [prompt.prompt], PLAIN if chooser is None else None, max_tokens, 0.0, 0, side)
    return [replace(speed, measured=sides[speed.name].speed if speed.name in sides else None) for speed in speeds]
