"""Which drafted nodes are verified: those that bring the most committed tokens a second (law L4). The text never depends on it (L1).

A node survives if the target chooses its whole path. Its chance is the product over the path of q * r: q the proposer's probability
of the node, r how much more or less often than its q the target chose nodes of that level at that depth, in this request (moving sums,
the whole engine's before it has its own). Every proposal is scored against what was committed, the nodes that were not sent included: what
follows is known as far as tokens were committed.

Of all proposed nodes of all requests, those that speed up their own request most first, the step takes the M that minimise

    mean over requests of (t_draft + t(N + M)) / (1 + sum of its nodes' chances)

the mean time that a request waits for a token; N are the sequences that decode, t is runtime/costs.py. With the speeds' arithmetic mean
(vLLM's adaptive verification), and still with their geometric one, a few requests that draft well make the steps of all others longer,
which have no part in it, and a batch ends with its slowest; for one request all three are the same. M = 0 is always among them (and taken
once in some hundred steps, to keep its cost known). Where several sequences decode, no step is made LONGEST times as long as without
drafts. A request whose drafts do not pay for themselves is not asked for a while (then rarely, the more rarely the dearer drafts are, and
again at once when a probe pays); how many nodes a level is asked for follows how many were taken.

Nothing here reads a clock or draws: decisions are a function of the events. `trace` keeps both, and `replay` decides again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, inf
from typing import TYPE_CHECKING, Any

import numpy as np

from mlsdc.runtime.costs import ROUND, Costs
from mlsdc.runtime.tree import MAX_NODES, Tree

if TYPE_CHECKING:
    from mlsdc.runtime.plan_file import Rate

KEEP = 0.92  # of a request's own sums, a step
KEEP_ALL = 0.995  # of the engine's
PRIOR = 3.0  # steps of its own after which a request counts more than the engine
DEPTHS = 8  # deeper ones count as this deep
MARGIN = 1.05  # nodes must promise this much more than none: a longer step also costs what is not measured
LONGEST = 1.25  # a step with drafts takes at most so many steps without: tokens of others must not come late
WORTH_SHARE = 0.1
FIRST_PAUSE, LONGEST_PAUSE = 8, 128  # steps until a level that did not pay is asked again
PROBES = 0.025  # of all time at most goes into asking again: a pause is longer where drafts are dear
MOST_PAUSE = 4096
TRIALS = 3
KNOWN = 24  # proposals after which it is known what they are worth among so many sequences
HOPE = 0.9
ROOM_KNOWN = 16  # steps until it is looked at again whether drafts can pay at all
LEAST = 3  # nodes that are asked for if any are
CERTAIN = 0.995
LEAST_CHANCE = 0.04  # a row costs more than this part of a token everywhere
MOST_KNOWN = 100.0  # steps that measured rates count as, at most


class Rates:
    """Moving sums of chosen nodes and of the probability that proposers gave them, by (level, depth)."""

    def __init__(self, keep: float) -> None:
        self.keep = keep
        self.sums: dict[tuple[int, int], list[float]] = {}

    def learn(self, key: tuple[int, int], hit: float, mass: float) -> None:
        sums = self.sums.setdefault(key, [0.0, 0.0, 0.0])
        keep = self.keep
        sums[0] = sums[0] * keep + hit
        sums[1] = sums[1] * keep + mass
        sums[2] = sums[2] * keep + 1.0


@dataclass
class Drafter:
    """What the controller keeps of one request."""

    id: int = 0
    rates: Rates = field(default_factory=lambda: Rates(KEEP))
    worth: float = 0.0  # moving average of seconds that a proposal saved, its own cost taken off
    asked: int = 0  # proposals so far
    taken: float = -1.0  # moving average of nodes that were verified; -1: none yet
    pause: int = 0  # steps until it is asked again; 0: it drafts
    last_pause: int = 0
    paused_at: int = 0  # sequences that decoded then


@dataclass(frozen=True)
class Proposal:
    """A request's tree of this step, and whether its choices are drawn (temperature > 0)."""

    drafter: Drafter
    tree: Tree
    sampled: bool = False


class Controller:
    """One engine's. The step owns it: not thread-safe."""

    def __init__(self, costs: Costs | None = None, *, trace: list[dict[str, Any]] | None = None) -> None:
        self.costs = Costs() if costs is None else costs
        self._all = {False: Rates(KEEP_ALL), True: Rates(KEEP_ALL)}
        self._rows = 1  # of the last step
        self._worth: dict[int, list[float]] = {}  # by log2 of the sequences: proposals judged, and what they saved in the mean
        self._rooms: dict[tuple[int, int, int], tuple[int, int]] = {}  # of `room`: nodes, and when that was found
        self._shortest = FIRST_PAUSE  # pause, after the last proposals
        self.trace = trace

    def know(self, rates: Iterable[Rate], names: Sequence[str]) -> None:
        """Begin with what `mlsdc tune` counted; `names` are the artifact's levels."""
        places = {name: i for i, name in enumerate(names)}
        for rate in rates:
            if rate.level in places and rate.depth <= DEPTHS:
                weight = min(float(rate.steps), MOST_KNOWN)
                self._all[rate.sampled].sums[places[rate.level], rate.depth] = [rate.hit * weight, rate.mass * weight, weight]

    def drafter(self, number: int) -> Drafter:
        """What is kept of a new request."""
        return Drafter(number)

    def leave(self, drafter: Drafter) -> None:
        """The request is over."""

    def wish(self, drafter: Drafter, budget: int) -> int:
        """How many nodes to ask of the request's level for the next step, 0 to not ask; counts a step of a pause."""
        nodes = self._wish(drafter, budget)
        if self.trace is not None:
            self.trace.append({"event": "wish", "id": drafter.id, "budget": budget, "nodes": nodes})
        return nodes

    def welcome(self, drafter: Drafter, sequences: int) -> bool:
        """Whether a request that was never asked is asked now: not where so many sequences at once found that drafts do not pay."""
        if self.trace is not None and not drafter.asked:
            self.trace.append({"event": "welcome", "id": drafter.id, "sequences": sequences})
        seen, worth = self._everyones_worth(sequences)
        if drafter.asked or drafter.last_pause or seen < self._fewer(KNOWN) or worth >= 0:
            return True
        drafter.last_pause, drafter.paused_at = self._shortest, sequences
        drafter.pause = self._shortest + drafter.id % self._shortest  # not all of them at once
        return False

    def _everyones_worth(self, sequences: int) -> tuple[float, float]:
        """Proposals judged among so many sequences, and the seconds they saved in the mean."""
        seen, worth = self._worth.get(sequences.bit_length(), (0.0, 0.0))
        return seen, worth

    def shortest(self, asked: int, sequences: int, draft_s: float, plain_s: float) -> int:
        """Steps of the shortest pause, where `asked` proposals took `draft_s` and `sequences` decode, in `plain_s` without drafts."""
        steps = sequences * draft_s / (max(1, asked) * PROBES * plain_s)
        self._shortest = max(FIRST_PAUSE, ceil(min(steps, MOST_PAUSE)))
        return self._shortest

    def trials(self) -> int:
        """Proposals after which a request's drafts may be judged."""
        return self._fewer(FIRST_PAUSE)

    def _fewer(self, count: int) -> int:
        """So many proposals, or fewer where they are dear."""
        return max(TRIALS, count * FIRST_PAUSE // self._shortest)

    def _wish(self, drafter: Drafter, budget: int) -> int:
        if drafter.pause and 2 * self._rows <= drafter.paused_at:
            drafter.pause = 0  # others are gone: rows are cheaper now
        if drafter.pause:
            drafter.pause -= 1
            if drafter.pause:
                return 0
        if drafter.taken < 0 or drafter.last_pause:
            return budget
        return min(budget, LEAST + int(2 * drafter.taken + 0.999))

    def step(self, rows: int, context: int, seconds: float, nodes: int = 0) -> None:
        """A step of `rows` rows, `nodes` of them drafted, was run, after `context` tokens a sequence in the mean."""
        self.costs.learn(rows, context, seconds, drafted=nodes > 0)
        self._rows = rows
        if self.trace is not None:
            self.trace.append({"event": "step", "rows": rows, "context": context, "seconds": seconds, "nodes": nodes})

    def choose(self, proposals: Sequence[Proposal], rows: int, sequences: int, context: int, draft_s: float) -> list[Tree]:
        """The trees to send: of each proposal a part that holds every node's parent. `rows` are sent in any case, by `sequences` sequences
        that decode, with `context` tokens before them in the mean; `draft_s` is what the proposals took."""
        kept = self._decide(proposals, rows, sequences, context, draft_s)
        trees = [proposal.tree.select(nodes) for proposal, nodes in zip(proposals, kept, strict=True)]
        if self.trace is not None:
            made = [{"id": p.drafter.id, "tokens": p.tree.tokens, "parents": p.tree.parents, "logq": p.tree.logq, "levels": p.tree.levels,
                     "sampled": p.sampled} for p in proposals]
            self.trace.append({"event": "choose", "proposals": made, "rows": rows, "sequences": sequences, "context": context,
                               "draft_s": draft_s, "kept": [sorted(nodes) for nodes in kept]})
        return trees

    def _decide(self, proposals: Sequence[Proposal], rows: int, sequences: int, context: int, draft_s: float) -> list[list[int]]:
        """The nodes of each proposal that `choose` sends; native_controller.py does the same, bit for bit."""
        chances = [self.chances(proposal) for proposal in proposals]
        queues = [sorted((node for node, chance in enumerate(found) if chance > LEAST_CHANCE), key=lambda node: (-found[node], node))
                  for found in chances]
        total = sum(map(len, queues))
        seconds = self.costs.line(rows, total, context)
        plain_s, most_s = seconds[0], self.most_s(sequences, context)
        self.shortest(len(proposals), sequences, draft_s, plain_s)
        stale = self.costs.stale(rows)
        if stale:
            total = 0  # what a step without drafts takes must be known to know what they cost
        order: list[tuple[int, int]] = []
        gains, taken = [1.0] * len(proposals), [0] * len(proposals)
        best, best_score, waits = 0, MARGIN, float(max(sequences, len(proposals)))
        everyone = waits
        for m in range(1, total + 1):
            first, factor = -1, 0.0
            for i, queue in enumerate(queues):
                if taken[i] < len(queue):
                    more = (gains[i] + chances[i][queue[taken[i]]]) / gains[i]
                    if first < 0 or more > factor:
                        first, factor = i, more
            node = queues[first][taken[first]]
            order.append((first, node))
            taken[first] += 1
            waits -= 1.0 / gains[first]
            gains[first] += chances[first][node]
            waits += 1.0 / gains[first]
            score = (everyone / waits) * ((draft_s + plain_s) / (draft_s + seconds[m]))
            if score > best_score and seconds[m] <= most_s:
                best, best_score = m, score
        kept: list[list[int]] = [[] for _ in proposals]
        for i, node in order[:best]:
            kept[i].append(node)
        if not stale:
            self._judge(proposals, kept, chances, plain_s, seconds[best] - plain_s, sequences, draft_s)
        return kept

    def most_s(self, sequences: int, context: int) -> float:
        """The longest step that drafts may make of one in which `sequences` decode. One alone waits for nobody."""
        return LONGEST * self.costs.step_s(sequences, context) if sequences > 1 else inf

    def room(self, rows: int, sequences: int, context: int) -> int:
        """How many nodes a step of `rows` rows may have and still pay if nearly all of them are right (HOPE); 0: nobody need be asked.

        Looked at again every ROOM_KNOWN steps of such a size.
        """
        key = (rows, sequences, context // ROUND)
        known = self._rooms.get(key)
        if known is not None and self.costs.steps - known[1] < ROOM_KNOWN:
            return known[0]
        seconds = np.array(self.costs.line(rows, MAX_NODES, context))
        each, more = np.divmod(np.arange(MAX_NODES + 1), sequences)  # spread evenly they bring most
        waits = (sequences - more) / (1 + HOPE * each) + more / (1 + HOPE * (each + 1))
        pays = sequences * seconds[0] > MARGIN * seconds * waits
        found = np.flatnonzero(pays & (seconds <= self.most_s(sequences, context)))
        if len(self._rooms) > 256:
            self._rooms.clear()
        self._rooms[key] = int(found[-1]) if len(found) else 0, self.costs.steps
        return self._rooms[key][0]

    def chances(self, proposal: Proposal) -> list[float]:
        """Of each node, that the target chooses its whole path; never more than its parent's."""
        tree, found, ratios = proposal.tree, list[float](), dict[tuple[int, int], float]()
        depths = tree.depths()
        for node, parent in enumerate(tree.parents):
            key = (tree.levels[node] if tree.levels else 0, min(depths[node], DEPTHS))
            ratio = ratios.get(key)
            if ratio is None:
                ratio = ratios[key] = self._ratio(proposal, key)
            own = min(CERTAIN, said(tree, node) * ratio)
            found.append(own * (found[parent] if parent >= 0 else 1.0))
        return found

    def _ratio(self, proposal: Proposal, key: tuple[int, int]) -> float:
        hit, mass, count = self._all[proposal.sampled].sums.get(key, (0.0, 0.0, 0.0))
        prior = (hit + 0.9) / (mass + 1.0)
        own_hit, own_mass, _ = proposal.drafter.rates.sums.get(key, (0.0, 0.0, 0.0))
        mean_mass = mass / count if count else 0.7
        return (own_hit + PRIOR * mean_mass * prior) / (own_mass + PRIOR * mean_mass)

    def _judge(self, proposals: Sequence[Proposal], kept: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], plain_s: float,
               more_s: float, sequences: int, draft_s: float) -> None:
        """Seconds that each proposal saves: what its tokens take without drafts, less its share of the longer step and of drafting."""
        token_s, nodes = plain_s / max(1, sequences), max(1, sum(map(len, kept)))
        for proposal, taken, found in zip(proposals, kept, chances, strict=True):
            drafter = proposal.drafter
            tokens = 0.0
            for node in taken:
                tokens += found[node]
            saved = token_s * tokens - more_s * len(taken) / nodes - draft_s / len(proposals)
            drafter.asked += 1
            everyone = self._worth.setdefault(sequences.bit_length(), [0.0, 0.0])
            everyone[0] = min(everyone[0] + 1, KNOWN * 4)
            everyone[1] += (saved - everyone[1]) / everyone[0]
            drafter.worth += (saved - drafter.worth) * max(WORTH_SHARE, 1 / drafter.asked)
            drafter.taken = len(taken) if drafter.taken < 0 or drafter.last_pause else drafter.taken + 0.25 * (len(taken) - drafter.taken)
            if saved > 0 and drafter.last_pause:  # a probe that paid
                drafter.worth, drafter.last_pause = saved, 0
            elif drafter.last_pause or (drafter.asked >= self.trials() and drafter.worth < 0):
                longest = max(LONGEST_PAUSE, self._shortest)
                drafter.last_pause = drafter.pause = min(longest, max(self._shortest, 2 * drafter.last_pause))
                drafter.paused_at = sequences

    def learn(self, proposal: Proposal, committed: Sequence[int]) -> None:
        """Score a proposal, whole as it was, against the tokens that came."""
        if self.trace is not None:
            self.trace.append({"event": "learn", "id": proposal.drafter.id, "committed": list(committed)})
        self._score(proposal, committed)

    def _score(self, proposal: Proposal, committed: Sequence[int]) -> None:
        everyone, own = self._all[proposal.sampled], proposal.drafter.rates
        for depth, (masses, hit) in enumerate(passed(proposal.tree, committed), 1):
            for level, mass in masses.items():
                key = (level, min(depth, DEPTHS))
                everyone.learn(key, float(level == hit), min(1.0, mass))
                own.learn(key, float(level == hit), min(1.0, mass))


def passed(tree: Tree, following: Sequence[int]) -> Iterator[tuple[dict[int, float], int]]:
    """By depth, as far as a tree and the text that follows go together: the probability that each level gave its nodes there, and whose
    node was chosen (-1: none)."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    at = -1
    for token in following:
        masses: dict[int, float] = {}
        hit, after = -1, -1
        for node in children.get(at, ()):
            level = tree.levels[node] if tree.levels else 0
            masses[level] = masses.get(level, 0.0) + said(tree, node)
            if tree.tokens[node] == token and hit < 0:
                hit, after = level, node
        if not masses:
            return
        yield masses, hit
        if hit < 0:
            return
        at = after


def said(tree: Tree, node: int) -> float:
    """The probability that the proposer gave a node, given its parent: f32, as levels compute it."""
    return float(np.float32(exp(min(0.0, tree.logq[node])))) if tree.logq else 1.0


def replay(trace: Sequence[Mapping[str, Any]], costs: Costs | None = None) -> list[dict[str, Any]]:
    """What a new controller decides on the events of a trace: the same trace again, if `costs` begin as they did there."""
    controller = Controller(costs, trace=[])
    drafters: dict[int, Drafter] = {}
    last: dict[int, Proposal] = {}

    def drafter(number: int) -> Drafter:
        return drafters.setdefault(number, Drafter(number))

    for event in trace:
        if event["event"] == "choose":
            proposals = [
                Proposal(drafter(made["id"]), Tree(*(tuple(made[key]) for key in ("tokens", "parents", "logq", "levels"))), made["sampled"])
                for made in event["proposals"]]
            last.update((proposal.drafter.id, proposal) for proposal in proposals)
            controller.choose(proposals, event["rows"], event["sequences"], event["context"], event["draft_s"])
        elif event["event"] == "welcome":
            controller.welcome(drafter(event["id"]), event["sequences"])
        elif event["event"] == "wish":
            controller.wish(drafter(event["id"]), event["budget"])
        elif event["event"] == "learn":
            controller.learn(last[event["id"]], event["committed"])
        else:
            controller.step(event["rows"], event["context"], event["seconds"], event["nodes"])
    assert controller.trace is not None
    return controller.trace
