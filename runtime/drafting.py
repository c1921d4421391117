"""Drafting: which nodes each decoding item sends to be verified, and what is learned from the outcome.

The engine's step calls `draft` before its rows are written and `committed` once the target has chosen; between them it knows nothing of
levels. Levels propose, the controller (runtime/controller.py) chooses what is sent and how many nodes the scheduler makes room for in
the next step. The step owns it: not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mlsdc.runtime.controller import Controller, Drafter, Proposal
from mlsdc.runtime.costs import Costs
from mlsdc.runtime.levels.base import Level, LevelState
from mlsdc.runtime.levels.compose import compose
from mlsdc.runtime.manifest import Manifest
from mlsdc.runtime.plan_file import PlanFile
from mlsdc.runtime.request import Request, StepItem
from mlsdc.runtime.tree import Tree


class Drafting:
    """The drafting levels of one engine, cheapest first; none of them: plain decoding."""

    def __init__(self, manifest: Manifest, levels: Sequence[Level], controller: Controller | None = None, *,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        """Raises ArtifactError."""
        self.levels = tuple(levels)
        infos = [info for level in levels for info in manifest.levels if info.name == level.name]
        self.level = compose(levels, infos, manifest.target_level.name)
        self.reads_target = self.level is not None and self.level.reads_target
        self.controller = Controller() if controller is None else controller
        self.clock = clock
        self.plan_note = "shipped default"
        self._vocab_size = manifest.model.vocab_size
        self._names = (*(level.name for level in manifest.levels), "grammar")  # forced tokens count as a level of their own
        self._drafters: dict[int, Drafter] = {}  # by request id
        self._asked: dict[int, tuple[Proposal, int]] = {}  # this step's proposals, and how many tokens their requests had
        self._choose_s = 2e-5  # what choosing takes for a proposal, a moving average: drafting costs that, too
        self._step: tuple[int, float] | None = None  # context and start of the step that runs

    def take(self, plan: PlanFile | None, why: str) -> None:
        """Begin with what was measured on this machine, or with the shipped default; `why` says which."""
        self.plan_note = why
        if plan is not None:
            self.controller = Controller(Costs(plan.costs))
            self.controller.know(plan.rates, self._names)

    def draft(self, items: Sequence[StepItem]) -> None:
        """Set each decoding item's tree, of at most its budget. A draft that cannot be verified is no draft."""
        level = self.level
        if level is None:
            return
        self._asked.clear()
        if not any(item.request.budget for item in items):  # nobody speculates: a plain engine's step (law L4)
            return
        decoding = [item for item in items if item.decodes]
        rows, sequences = sum(item.rows for item in items), len(decoding)
        context = sum(item.request.num_computed for item in decoding) // max(1, sequences)
        wanted = [item for item in decoding if item.budget and self.controller.welcome(self._drafter(item.request), sequences)]
        if wanted:
            start = self.clock()
            states = [self._state(item.request) for item in wanted]
            trees = level.propose_all(states, [item.budget for item in wanted])
            proposals = [
                Proposal(self._drafter(item.request), tree, item.request.params.temperature > 0)
                for item, tree in zip(wanted, trees, strict=True) if self._fits(item, tree)]
            able = [item for item, tree in zip(wanted, trees, strict=True) if self._fits(item, tree)]
            proposed = self.clock()
            kept = self.controller.choose(proposals, rows, sequences, context, proposed - start + self._choose_s * len(proposals))
            self._choose_s += 0.1 * ((self.clock() - proposed) / max(1, len(proposals)) - self._choose_s)
            for item, proposal, tree in zip(able, proposals, kept, strict=True):
                item.tree = tree
                self._asked[item.request.id] = proposal, len(item.request.tokens)
        self._step = (context, self.clock()) if decoding else None

    def _fits(self, item: StepItem, tree: Tree) -> bool:
        return len(tree) <= item.budget and (not tree or (min(tree.tokens) >= 0 and max(tree.tokens) < self._vocab_size))

    def _drafter(self, request: Request) -> Drafter:
        return self._drafters.setdefault(request.id, Drafter(request.id))

    def _state(self, request: Request) -> LevelState:
        """The level's state of the request, which has seen all of its committed tokens."""
        assert self.level is not None
        if request.drafter is None:
            request.drafter = self.level.start()
            if request.params.temperature > 0:
                request.drafter.couple(request.seed)
            if request.params.speculation is not None and request.params.speculation.levels is not None:
                request.drafter.only(request.params.speculation.levels)
        if request.num_observed < len(request.tokens):
            request.drafter.observe(request.tokens[request.num_observed :])
            request.num_observed = len(request.tokens)
        request.drafter.place(request.table, request.num_computed)
        return request.drafter

    def stepped(self, items: Sequence[StepItem], firsts: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Every item's rows of the step that are committed now, the first of them at position `firsts[i]`. Only if `reads_target`."""
        if self.level is not None:
            states = [self._state(item.request) if item.request.budget else None for item in items]
            self.level.stepped(states, firsts, rows)

    def committed(self, item: StepItem, accepted: Sequence[int]) -> None:
        """The target chose: `accepted` are the indices of the nodes of the item's tree that were committed."""
        request, tree = item.request, item.tree
        if self.level is not None and request.budget:
            asked = self._asked.pop(request.id, None)
            if asked is not None:
                proposal, before = asked
                self.controller.learn(proposal, request.tokens[before:])
            request.wish = self.controller.wish(self._drafter(request), request.budget)
        if not tree:
            request.statistics.steps += 1
            return
        names = [self._names[i] for i in tree.levels or (0,) * len(tree)]
        request.statistics.count_step(names, tree.depths(), set(accepted))

    def done(self, items: Sequence[StepItem]) -> None:
        """The step is over: what it took since its drafts is what its rows cost, of trees as they were sent (a grammar changes some)."""
        if self._step is not None:
            context, start = self._step
            self._step = None
            self.controller.step(sum(item.rows + len(item.tree) for item in items), context, self.clock() - start)

    def end(self, request: Request) -> None:
        """The request is over: forget what was kept for it."""
        if request.drafter is not None:
            request.drafter.release()
        request.drafter = None
        self._drafters.pop(request.id, None)
