"""Drafting: which nodes each decoding item sends to be verified, and what is learned from the outcome.

The engine's step calls `draft` before its rows are written and `committed` once the target has chosen; between them it knows nothing of
levels. Levels propose, the controller (runtime/controller.py) chooses what is sent and how many nodes the scheduler makes room for in
the next step. The step owns it: not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from mlsdc.runtime.controller import Controller, Drafter, Proposal
from mlsdc.runtime.costs import Costs
from mlsdc.runtime.device.base import BoundProgram, Device
from mlsdc.runtime.levels.base import Level, LevelState
from mlsdc.runtime.levels.compose import compose
from mlsdc.runtime.levels.coupling import Draw
from mlsdc.runtime.levels.ngram_native import NativeNgramLevel, NativeNgramState
from mlsdc.runtime.manifest import Manifest
from mlsdc.runtime.native_controller import CHOOSE, MakeList, NativeController, SlotDrafter
from mlsdc.runtime.native_drafting import NgramBatch, Seat
from mlsdc.runtime.plan_file import PlanFile
from mlsdc.runtime.request import Request, StepItem
from mlsdc.runtime.tree import Tree

UNTIMED = 2.0  # times what is timed of drafting is what it adds to a step: 145 us of 64 at four requests (counters, pages, colder caches)
QUIET_LEARNED = 4  # of so many steps in which nobody is asked the time of one is learned


class Drafting:
    """The drafting levels of one engine, cheapest first; none of them: plain decoding."""

    def __init__(self, manifest: Manifest, levels: Sequence[Level], controller: Controller | None = None, *,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        """Raises ArtifactError."""
        self.levels = tuple(levels)
        self._infos = [info for level in levels for info in manifest.levels if info.name == level.name]
        self._target = manifest.target_level.name
        self._compose(())
        self._make_list: MakeList | None = None
        self._batch: NgramBatch | None = None
        self._drafters: dict[int, Drafter] = {}  # by request id
        self._controller = Controller() if controller is None else controller
        self.clock = clock
        self.plan_note = "shipped default"
        self.vocab_size = manifest.model.vocab_size
        self._names = (*(level.name for level in manifest.levels), "grammar")  # forced tokens count as a level of their own
        self._asked: dict[int, tuple[Proposal, int]] = {}  # this step's proposals, and how many tokens their requests had
        self._host_s = 5e-5  # what a proposal takes of the host, learning included, a moving average; proposing, too, where that is native
        self._spent_s, self._spent_for = 0.0, 0  # what is timed of that in this step, and for how many proposals
        self._step: tuple[int, float] | None = None  # context and start of the step that runs, if its time is to be learned
        self._quiet = 0  # steps in a row in which nobody was asked
        self._full = False  # this step had no room for drafts: nobody was asked, and nothing is kept free in the next one
        self._plain = False  # this step had no room, or nothing that was proposed was worth sending: no level works behind it
        self._behind = False  # levels work behind this step
        self._turns: list[tuple[Request, Seat]] = []  # requests with a seat that the step brought tokens

    def _compose(self, dropped: Collection[str]) -> None:
        """Levels that do not pay are left out: they are neither asked nor fed."""
        self.level = compose(self.levels, self._infos, self._target, dropped)

    @property
    def reads_target(self) -> bool:
        """Whether `stepped` is to be called."""
        return self.level is not None and self.level.reads_target

    @property
    def controller(self) -> Controller:
        """What decides; another one begins with nothing known of the requests."""
        return self._controller

    @controller.setter
    def controller(self, controller: Controller) -> None:
        self._controller = controller
        self._drafters = {}
        self._batch = None
        if isinstance(controller, NativeController) and isinstance(self.level, NativeNgramLevel) and self._make_list is not None:
            self._batch = NgramBatch(self.level, controller, self._make_list)

    def use(self, device: Device) -> None:
        """From now on the controller decides by the device's native code, if it has any."""
        if device.native(CHOOSE) is not None and self.level is not None:
            self._make_list = device.host_list
            self.controller = NativeController(device.host_list, len(self._names), self.controller.costs)

    def take(self, plan: PlanFile | None, why: str) -> None:
        """Begin with what was measured on this machine, or with the shipped default; `why` says which. Levels that the plan drops draft
        nothing. Before the first request."""
        left_out = [level.name for level in self.levels if plan is not None and level.name in plan.dropped]
        self.plan_note = why + (f"; left out: {', '.join(left_out)}" if left_out else "")
        self._compose(left_out)
        if plan is not None:
            costs = Costs(plan.costs)
            self.controller = Controller(costs) if self._make_list is None else NativeController(self._make_list, len(self._names), costs)
            self.controller.know(plan.rates, self._names)

    def draft(self, items: Sequence[StepItem]) -> None:
        """Set each decoding item's tree, of at most its budget. A draft that cannot be verified is no draft."""
        level = self.level
        if level is None:
            return
        self._asked.clear()
        self._full = self._plain = self._behind = False
        self._spent_s, self._spent_for = 0.0, 0
        if not any(item.request.budget for item in items):  # nobody speculates: a plain engine's step (law L4)
            return
        decoding = [item for item in items if item.decodes]
        if not decoding:
            return
        rows, sequences = sum(item.rows for item in items), len(decoding)
        context = sum(item.request.num_computed for item in decoding) // sequences
        room = self.controller.room(rows, sequences, context)
        if not room:
            self._full = rows == sequences  # rows of prompts pass
            self._plain = True
            self._begin_step(context, asked=False)
            return
        if self._batch is not None and self.controller.trace is None:
            asked = self._draft_natively(self._batch, decoding, room, rows, sequences, context)
            self._begin_step(context, asked=asked)
            return
        start = self.clock()
        welcome = [(item, self._state(item.request)) for item in decoding
                 if item.budget and self.controller.welcome(self._drafter(item.request), sequences)]
        wanted = [item for item, state in welcome if state.prepared]
        if wanted:
            states = [state for _, state in welcome if state.prepared]
            trees = level.propose_all(states, [min(item.budget, room) for item in wanted])
            able = [(item, tree) for item, tree in zip(wanted, trees, strict=True) if self._fits(item, tree)]
            proposals = [Proposal(self._drafter(item.request), tree, item.request.params.temperature > 0) for item, tree in able]
            proposed = self.clock()
            kept = self.controller.choose(proposals, rows, sequences, context, proposed - start + self._host_s * len(proposals))
            self._spent_s, self._spent_for = self.clock() - proposed, len(proposals)
            for (item, _), proposal, tree in zip(able, proposals, kept, strict=True):
                item.tree = tree
                self._asked[item.request.id] = proposal, len(item.request.tokens)
            self._plain = any(trees) and not any(kept)
        self._begin_step(context, asked=bool(wanted))

    def _begin_step(self, context: int, *, asked: bool) -> None:
        """Its time will be learned: always where somebody was asked, else now and then, since learning takes time, too."""
        self._quiet = 0 if asked else self._quiet + 1
        if self._quiet % QUIET_LEARNED == 0:
            self._step = context, self.clock()

    def _draft_natively(self, batch: NgramBatch, items: Sequence[StepItem], room: int, rows: int, sequences: int, context: int) -> bool:
        """`draft` of requests whose proposals come from an n-gram level alone: two native calls for all of them. Whether any was asked."""
        start = self.clock()
        items = [item for item in items if item.budget]
        # all of them before the first is asked: where slots run out, everything moves, and what `ask` has written is lost
        seats = [batch.seat(item.request.id) or batch.sit(item.request.id, self._slot(item.request)) for item in items]
        asked = []
        for item, seat in zip(items, seats, strict=True):
            request = item.request
            if seat.state is None:
                if not self.controller.welcome(seat.drafter, sequences):
                    continue
                state = self._begin(request)
                assert isinstance(state, NativeNgramState)
                batch.begin(seat, state)
            batch.ask(seat, request.tokens, min(item.budget, room))
            request.num_observed = seat.before
            asked.append(item)
        if not asked:
            return False
        for item, tree in zip(asked, batch.draft(rows, sequences, context, self._host_s * len(asked)), strict=True):
            if tree is not None:
                item.tree = tree
        self._spent_s, self._spent_for = self.clock() - start, len(asked)
        return True

    def _fits(self, item: StepItem, tree: Tree) -> bool:
        return len(tree) <= item.budget and (not tree or (min(tree.tokens) >= 0 and max(tree.tokens) < self.vocab_size))

    def _drafter(self, request: Request) -> Drafter:
        drafter = self._drafters.get(request.id)
        if drafter is None:
            drafter = self._drafters[request.id] = self.controller.drafter(request.id)
        return drafter

    def _slot(self, request: Request) -> SlotDrafter:
        drafter = self._drafter(request)
        assert isinstance(drafter, SlotDrafter)
        return drafter

    def _state(self, request: Request) -> LevelState:
        """The level's state of the request, which has seen all of its committed tokens and where its pages are."""
        state = self._seen(request)
        state.place(request.table, request.num_computed)
        return state

    def _seen(self, request: Request) -> LevelState:
        """The level's state of the request, which has seen all of its committed tokens."""
        state = self._begin(request)
        if request.num_observed < len(request.tokens):
            state.observe(request.tokens[request.num_observed :])
            request.num_observed = len(request.tokens)
        return state

    def _begin(self, request: Request) -> LevelState:
        """The level's state of the request."""
        if request.drafter is None:
            assert self.level is not None
            request.drafter = self.level.start()
            if request.params.temperature > 0:
                request.drafter.couple(Draw.of(request.sampler.seed, request.params))  # the seed of this choice of `n`
            if request.params.speculation is not None and request.params.speculation.levels is not None:
                request.drafter.only(request.params.speculation.levels)
        return request.drafter

    def ahead(self, items: Sequence[StepItem], follow: BoundProgram | None) -> None:
        """The target's programs are started, not waited for: levels that look ahead work behind them, for the next step. Not behind a step
        without drafts that shows what such a step takes; then levels draft in their own time, which shows what that takes (law L4)."""
        level = self.level
        if level is None or not level.looks_ahead or follow is None or self._plain:
            return
        start = self.clock()
        states = [self._seen(item.request) if self._goes_on(item) else None for item in items]
        if any(states):
            follow.start()
            level.ahead(states)
            self._behind = True
            self._spent_s += self.clock() - start

    def _goes_on(self, item: StepItem) -> bool:
        """Whether the request may draft in the next step, for all that is known before this one's choices."""
        request = item.request
        return request.wish > 0 and request.max_length - len(request.tokens) > 2

    def stepped(self, items: Sequence[StepItem], firsts: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Every item's rows of the step that are committed now, the first of them at position `firsts[i]`. Only if `reads_target`."""
        if self.level is not None:
            states = [self._state(item.request) if item.request.budget else None for item in items]
            self.level.stepped(states, firsts, rows)

    def committed(self, item: StepItem, accepted: Sequence[int]) -> None:
        """The target chose: `accepted` are the indices of the nodes of the item's tree that were committed."""
        request, tree = item.request, item.tree
        if self._full:
            request.wish = 0
        elif not request.budget or self.level is None:
            pass
        elif self._batch is not None and self.controller.trace is None:
            if (seat := self._batch.seat(request.id)) is not None:
                self._turns.append((request, seat))  # learned from in `learned`
            elif request.wish == 0:
                request.wish = request.budget  # there was no room, and there is now
        else:
            asked = self._asked.pop(request.id, None)
            if asked is not None:
                proposal, before = asked
                start = self.clock()
                self.controller.learn(proposal, request.tokens[before:])
                self._spent_s += self.clock() - start
            request.wish = self.controller.wish(self._drafter(request), request.budget)
        if not tree:
            request.statistics.steps += 1
            return
        names = self._names
        request.statistics.count_step([names[i] for i in tree.levels or (0,) * len(tree)], tree.depths(), accepted)

    def learned(self) -> None:
        """All items of the step were `committed`."""
        turns = self._turns
        if not turns or self._batch is None:
            return
        self._turns = []
        start = self.clock()
        wishes = self._batch.learn([seat for _, seat in turns], [request.tokens for request, _ in turns],
                                   [request.budget for request, _ in turns])
        for (request, _), wish in zip(turns, wishes, strict=True):
            request.wish = wish
        self._spent_s += self.clock() - start

    def done(self, items: Sequence[StepItem]) -> None:
        """The step is over: what it took since its drafts is what its rows cost, of trees as they were sent (a grammar changes some), and
        what works behind such a step. One without drafts that something works behind shows neither."""
        if self._spent_for:
            self._host_s += 0.1 * (UNTIMED * self._spent_s / self._spent_for - self._host_s)
        if self._step is not None:
            context, start = self._step
            self._step = None
            nodes = sum(len(item.tree) for item in items)
            if nodes or not self._behind:
                self.controller.step(sum(item.rows for item in items) + nodes, context, self.clock() - start, nodes)

    def end(self, request: Request) -> None:
        """The request is over: forget what was kept for it."""
        if request.drafter is not None:
            request.drafter.release()
        request.drafter = None
        if self._batch is not None:
            self._batch.leave(request.id)
        drafter = self._drafters.pop(request.id, None)
        if drafter is not None:
            self.controller.leave(drafter)
