"""What a cascade of verifying levels brings, exactly (DESIGN 6): expected tokens of a round, its time, and the best tree and depth.

Level 0 drafts k tokens a round. A round of level i takes n rounds of the level below, verifies what they gave in one step, and gives what
it accepted and its own next token. With pgfs, for independent acceptance a:

    phi_0(x) = x^k    G_i(x) = phi_{i-1}(x)^n    phi_i(x) = x [(1 - a) + a (1 - x) G_i(a x)] / (1 - a x)
    E[N_i] = (1 - a G_i(a)) / (1 - a)            R_i = E[t_i(rows)] + n R_{i-1}

Here the distributions themselves are carried (the same numbers, and they also take measured survival curves in place of a^j): a step's time
is the mean over its rows, for it has knees.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
StepTime = Callable[[int], float]  # rows -> seconds
PAYS = 1.05  # a level is kept if the plan with it is this much faster than the best one without
MAX_CHAIN, MAX_ROUNDS = 16, 4


@dataclass(frozen=True)
class Survival:
    """Chance that a chain's first j tokens are accepted: `measured[j - 1]`, beyond them `alpha` a token."""

    alpha: float
    measured: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        values = (1.0, *self.measured)
        if not 0 <= self.alpha <= 1 or any(not 0 <= b <= a + 1e-12 for a, b in zip(values, values[1:], strict=False)):
            raise ValueError(f"survival: {self.measured} then {self.alpha}, expected falling chances from 1 to 0")

    def curve(self, length: int) -> Array:
        """S(0) = 1, S(1), .. S(length)."""
        known = (1.0, *self.measured)[: length + 1]
        tail = known[-1] * self.alpha ** np.arange(1, length + 2 - len(known))
        return np.concatenate([known, tail])


@dataclass(frozen=True)
class Stage:
    """A verifying level in a plan: it accepts what comes from below with `survival`, a step of it takes `step_s(rows)`, and it waits for
    `rounds` rounds of the level below."""

    name: str
    survival: Survival
    step_s: StepTime
    rounds: int = 1


@dataclass(frozen=True)
class Outcome:
    """`tokens`: expected a round of the last level, its own token included; `seconds` of that round, drafts and all."""

    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def accepted(given: Array, survival: Survival) -> Array:
    """Distribution of what a level gives (index: tokens), from that of what it is given."""
    curve = survival.curve(len(given) - 1)
    more = np.cumsum(given[::-1])[::-1]  # P(given > j - 1), from j = 0 on
    out = np.zeros(len(given) + 1)
    for j in range(len(given)):
        longer = more[j + 1] if j + 1 < len(given) else 0.0
        out[j + 1] += given[j] * curve[j] + longer * (curve[j] - (curve[j + 1] if j + 1 < len(curve) else 0.0))
    return out


def evaluate(chain: int, draft_s: float, stages: Sequence[Stage]) -> Outcome:
    """Of a plan whose lowest level drafts `chain` tokens at `draft_s` each. Without stages nothing is generated: at least the target."""
    given = np.zeros(chain + 1)
    given[chain] = 1.0
    seconds = chain * draft_s
    for stage in stages:
        below = given
        for _ in range(stage.rounds - 1):
            given = np.convolve(given, below)
        rows = np.array([stage.step_s(length + 1) for length in range(len(given))])
        seconds = float(given @ rows) + stage.rounds * seconds
        given = accepted(given, stage.survival)
    return Outcome(float(given @ np.arange(len(given))), seconds)


# --- trees ---


@dataclass(frozen=True)
class TreeShape:
    """`parents` as in runtime.tree; `ranks[i]`: node i is the rank-th best sibling; `chances[i]` of its whole path."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    chances: tuple[float, ...]

    @property
    def tokens(self) -> float:
        """Expected tokens of a step, its own included."""
        return 1.0 + sum(self.chances)


def best_tree(ranks: Sequence[float], nodes: int, depth: int = 64) -> TreeShape:
    """The tree of `nodes` nodes that accepts most, `ranks[b]` being the chance that the b-th best sibling is the one chosen: the likeliest
    paths, best first (optimal: a path is never likelier than its beginning)."""
    parents: list[int] = []
    places: list[int] = []
    chances: list[float] = []
    depths: list[int] = []
    heap = [(-chance, rank, -1) for rank, chance in enumerate(ranks[:1])]
    while heap and len(parents) < nodes:
        negative, rank, parent = heapq.heappop(heap)
        above = chances[parent] if parent >= 0 else 1.0
        node, level = len(parents), (depths[parent] if parent >= 0 else 0) + 1
        parents.append(parent)
        places.append(rank)
        chances.append(-negative)
        depths.append(level)
        if rank + 1 < len(ranks):
            heapq.heappush(heap, (-above * ranks[rank + 1], rank + 1, parent))
        if level < depth:
            heapq.heappush(heap, (negative * ranks[0], 0, node))
    return TreeShape(tuple(parents), tuple(places), tuple(chances))


def tree_tokens(ranks: Sequence[float], nodes: int) -> float:
    """The same expectation by dynamic programming over (nodes left, next sibling): what `best_tree` is tested against, and its equal."""

    @cache
    def forest(left: int, rank: int) -> float:
        if left == 0 or rank == len(ranks):
            return 0.0
        return max(ranks[rank] * (1 + forest(under, 0)) + forest(left - 1 - under, rank + 1) for under in range(left))

    return 1.0 + forest(nodes, 0)


# --- choosing ---


@dataclass(frozen=True)
class Candidate:
    """A level that may take part. `survival[upper]`: how the level named `upper` accepts its tokens; `ranks[upper]`: chance of its b-th
    best sibling, if it drafts trees; `draft_s`: seconds a token it drafts; `step_s`: a step, if it can verify."""

    name: str
    survival: dict[str, Survival]
    draft_s: float
    step_s: StepTime | None = None
    ranks: dict[str, tuple[float, ...]] | None = None


@dataclass(frozen=True)
class Plan:
    """Levels from the lowest up, the target left out; `chain` tokens (or `tree` nodes) of the lowest, `rounds` of each verifying level."""

    levels: tuple[str, ...]
    chain: int
    rounds: tuple[int, ...]
    tree: TreeShape | None
    outcome: Outcome

    def __str__(self) -> str:
        if not self.levels:
            return "off"
        drafts = f"tree of {len(self.tree.parents)}" if self.tree else f"chain of {self.chain}"
        return f"{' -> '.join(self.levels)}: {drafts}" + (f", rounds {'/'.join(map(str, self.rounds))}" if len(self.levels) > 1 else "")


@dataclass(frozen=True)
class Decision:
    """The plan that is chosen, the best plan of every cascade that was looked at (fastest first), and why a level was dropped."""

    best: Plan
    plans: tuple[Plan, ...]
    dropped: dict[str, str]


def choose(candidates: Sequence[Candidate], target: str, target_s: StepTime, *, max_nodes: int = MAX_CHAIN, batch: int = 1,
           host_s: float = 0.0) -> Decision:
    """The fastest cascade out of `candidates` (lowest first; any part of them, in this order) under a target whose step of `rows` rows
    takes `target_s(rows)`. `batch` sequences draft alike. A level that brings less than 5 % over the best plan without it is left out."""

    def step(rows: int) -> float:
        return target_s(batch * rows) + host_s

    off = Plan((), 0, (), None, Outcome(float(batch), step(1)))
    plans: dict[tuple[str, ...], Plan] = {(): off}
    for levels in parts(candidates):
        found = max(plans_of(levels, target, step, max_nodes, batch), key=lambda plan: plan.outcome.speed, default=None)
        if found is not None:
            plans[found.levels] = found
    kept = tuple(candidate.name for candidate in candidates)
    dropped: dict[str, str] = {}
    while kept:
        inside = [plan for levels, plan in plans.items() if set(levels) <= set(kept)]
        best = max(inside, key=lambda plan: plan.outcome.speed)
        losers = {}
        for name in kept:
            without = max((plan for plan in inside if name not in plan.levels), key=lambda plan: plan.outcome.speed)
            gain = best.outcome.speed / without.outcome.speed
            if gain < PAYS:
                losers[name] = (gain, without)
        if not losers:
            break
        name = min(losers, key=lambda n: (n in best.levels, losers[n][0]))
        gain, without = losers[name]
        dropped[name] = f"brings {100 * (gain - 1):.1f} % over {without} ({without.outcome.speed:.1f} tokens/s); 5 % is the least that pays"
        kept = tuple(n for n in kept if n != name)
    best = max((plan for levels, plan in plans.items() if set(levels) <= set(kept)), key=lambda plan: plan.outcome.speed)
    return Decision(best, tuple(sorted(plans.values(), key=lambda plan: -plan.outcome.speed)), dropped)


def parts(candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, ...]]:
    for mask in product((False, True), repeat=len(candidates)):
        if any(mask):
            yield tuple(candidate for candidate, taken in zip(candidates, mask, strict=True) if taken)


def plans_of(levels: Sequence[Candidate], target: str, target_s: StepTime, max_nodes: int, batch: int) -> Iterator[Plan]:
    """All plans of a cascade of these levels: chains with every number of rounds, and trees of a lone drafter."""
    lowest, *verifying = levels
    names = tuple(level.name for level in levels)
    uppers = [*(level.name for level in verifying), target]
    if any(level.step_s is None for level in verifying) or any(
            upper not in level.survival for level, upper in zip(levels, uppers, strict=True)):
        return
    for chain in range(1, max_nodes + 1):
        for rounds in product(range(1, MAX_ROUNDS + 1), repeat=len(verifying)):
            if chain * int(np.prod(rounds)) > max_nodes and rounds != (1,) * len(rounds):
                continue
            stages = [Stage(upper.name, below.survival[upper.name], scaled(upper.step_s, batch), n)
                      for below, upper, n in zip(levels, verifying, (1, *rounds), strict=False) if upper.step_s is not None]
            last = rounds[-1] if rounds else 1
            stages.append(Stage(target, levels[-1].survival[target], target_s, last))
            outcome = evaluate(chain, batch * lowest.draft_s, stages)
            yield Plan(names, chain, rounds, None, Outcome(batch * outcome.tokens, outcome.seconds))
    ranks = (lowest.ranks or {}).get(target)
    if ranks and not verifying:
        for nodes in range(1, max_nodes + 1):
            shape = best_tree(ranks, nodes)
            seconds = target_s(1 + nodes) + batch * nodes * lowest.draft_s
            yield Plan(names, nodes, (), shape, Outcome(batch * shape.tokens, seconds))


def scaled(step_s: StepTime, batch: int) -> StepTime:
    return lambda rows: step_s(batch * rows)
