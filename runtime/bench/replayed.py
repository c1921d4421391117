"""Ways to draft, played out on recorded texts: at every position what the levels propose, and the text that follows.

Levels see what was committed and nothing else, so that any way to draft can be followed through a text as the engine would: from a
position on to the one behind what it accepted. Only times are a model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

from mlsdc.runtime.bench.everything import Everything
from mlsdc.runtime.controller import Controller, Drafter, Proposal, passed
from mlsdc.runtime.costs import Costs, CostTable
from mlsdc.runtime.plan_file import PlanSpeed, Rate
from mlsdc.runtime.tree import EMPTY, Tree

C = TypeVar("C", bound=Controller)
PAYS = 1.05
RANKS = 6
FIXED = (2, 4, 8, 16)  # sizes of trees that are played out, and run, beside the chosen plan
CHOSEN, OFF = "chosen by the controller", "off"


@dataclass(frozen=True)
class Recorded:
    """A position of a text that request number `request` wrote: the tree proposed there, and the tokens that follow, the next one first."""

    request: int
    tree: Tree
    context: int
    following: tuple[int, ...]
    sampled: bool


@dataclass(frozen=True)
class DraftCost:
    """Seconds that asking for a tree of a request takes, at some sizes; between them as much as the next larger one."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, nodes: int) -> float:
        return self.seconds[min(bisect_right(self.sizes, nodes - 1), len(self.sizes) - 1)] if self.sizes else 0.0


@dataclass(frozen=True)
class Times:
    """`steps`: whole steps of a request whose levels are asked, but for asking and choosing. `plain_s`: what a step takes more where nobody
    is asked (less: it is negative). `choose_s`: taking the likeliest nodes of a tree; `decide_s`: choosing as the engine does."""

    steps: CostTable
    plain_s: float = 0.0
    choose_s: float = 0.0
    decide_s: float = 0.0


@dataclass(frozen=True)
class Texts:
    """What one set of levels proposed on all texts, and what asking them takes."""

    steps: Sequence[Recorded]
    draft: DraftCost = field(default_factory=lambda: DraftCost((), ()))

    @property
    def greedy(self) -> list[Recorded]:
        return [step for step in self.steps if not step.sampled]

    def rates(self, names: Sequence[str]) -> tuple[Rate, ...]:
        return tuple(survival(self.steps, names))


class SendBest(Everything):
    """Always the likeliest `nodes` nodes."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.nodes = nodes

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


def smaller(tree: Tree, nodes: int) -> Tree:
    """The tree that a level would have proposed, asked for `nodes` nodes: its likeliest paths."""
    if len(tree) <= nodes:
        return tree
    paths: list[float] = []
    for node, parent in enumerate(tree.parents):
        paths.append((paths[parent] if parent >= 0 else 0.0) + (min(0.0, tree.logq[node]) if tree.logq else 0.0))
    return likeliest(tree, paths, nodes)


def survival(steps: Sequence[Recorded], names: Sequence[str]) -> Iterator[Rate]:
    """Rates by level, depth and way of choosing."""
    sums: dict[tuple[bool, str, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for step in steps:
        for depth, (masses, hit) in enumerate(passed(step.tree, step.following), 1):
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
        for token in step.following:
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


def accepted(tree: Tree, following: Sequence[int]) -> int:
    """Nodes of a tree that the tokens run through."""
    return sum(hit >= 0 for _, hit in passed(tree, following))


def play(name: str, texts: Texts, times: Times, chooser: Controller, choose_s: float = 0.0) -> PlanSpeed:
    """Through all greedy texts, with what `chooser` sends of the trees; choosing takes `choose_s`."""
    tokens = steps = 0
    seconds = 0.0
    for request, group in groupby(texts.greedy, key=lambda step: step.request):
        positions = list(group)
        most = max(1, *(len(step.tree) for step in positions))
        drafter, wish, at = Drafter(request), most, 0
        while at < len(positions):
            step = positions[at]
            sent, got = EMPTY, 0
            if wish:
                draft_s = texts.draft.of(wish) + choose_s
                proposal = Proposal(drafter, smaller(step.tree, wish), step.sampled)
                (sent,) = chooser.choose([proposal], 1, 1, step.context, draft_s)
                got = min(accepted(sent, step.following), len(positions) - at - 1)
                chooser.learn(proposal, step.following[: got + 1])
                seconds += draft_s
            wish = chooser.wish(drafter, most)
            tokens, steps, at = tokens + 1 + got, steps + 1, at + 1 + got
            seconds += times.steps.step_s(1 + len(sent), step.context)
    return PlanSpeed(name, tokens / seconds, None, tokens / steps)


def plain_speed(texts: Texts, times: Times) -> PlanSpeed:
    greedy = texts.greedy
    context = round(sum(step.context for step in greedy) / len(greedy))
    return PlanSpeed(OFF, 1 / (times.steps.step_s(1, context) + times.plain_s), None, 1.0)


def played_out(levels: Sequence[str], texts_of: Callable[[Sequence[str]], Texts], times: Times, names: Sequence[str],
               settled: Mapping[str, str] | None = None) -> tuple[list[PlanSpeed], dict[str, str]]:
    """Predicted speeds of all plans, the chosen one first, and the levels that do not pay 5 % (or that are `settled` not to).

    `texts_of` some of the `levels` says what these propose when they are asked alone. The dearest level is doubted first. `names` are those
    of the levels' numbers.
    """

    def by_controller(kept: Sequence[str]) -> PlanSpeed:
        name, texts = CHOSEN if len(kept) == len(levels) else f"only {', '.join(kept)}", texts_of(kept)
        return play(name, texts, times, knowing(Controller(Measured(times.steps)), texts.rates(names), names), times.decide_s)

    full = texts_of(levels)
    off = plain_speed(full, times)
    speeds, dropped, kept = [off], dict[str, str](), list(levels)
    chosen = by_controller(levels)
    for level in sorted(levels, key=lambda name: -marginal(levels, texts_of)[name]):
        rest = [other for other in kept if other != level]
        without = by_controller(rest) if rest else off
        if level in settled if settled is not None else chosen.predicted < PAYS * without.predicted:
            gain = 100 * (chosen.predicted / without.predicted - 1)
            dropped[level] = f"brings {gain:.1f} % over {'the others' if rest else 'plain decoding'}; 5 % is the least that pays"
            if kept == list(levels) and rest:
                speeds.append(PlanSpeed(f"all of {', '.join(levels)}", chosen.predicted, None, chosen.length))
            kept = rest
            chosen = PlanSpeed(CHOSEN, without.predicted, None, without.length)
        elif rest:
            speeds.append(without)
    for nodes in FIXED:
        if any(len(step.tree) >= nodes for step in full.steps):
            speeds.append(play(f"always {nodes} nodes", full, times, knowing(SendBest(nodes), full.rates(names), names), times.choose_s))
    return [chosen, *speeds], dropped


def marginal(levels: Sequence[str], texts_of: Callable[[Sequence[str]], Texts]) -> Mapping[str, float]:
    """Level -> seconds that a whole tree takes longer for asking it, too."""
    def whole(some: Sequence[str]) -> float:
        return texts_of(some).draft.of(64) if some else 0.0

    return {level: max(0.0, whole(levels) - whole([other for other in levels if other != level])) for level in levels}


def knowing(made: C, rates: Sequence[Rate], names: Sequence[str]) -> C:
    made.know(rates, names)
    return made
