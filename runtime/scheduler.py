"""Which rows the next step computes: continuous batching, decided anew at every step.

Requests are served by (priority, arrival), the lower first. Order: (1) every decoding sequence gets its row; (2) what is left of the
budgets is shared out as room for drafted nodes, as many as requests wish for, half of it while prompts wait; (3) prompts of admitted
sequences go on in chunks; (4) waiting requests are admitted, the first in line first and nobody past it, while pages last. A sequence
that cannot grow preempts the last one in line, which is computed again later (with its own sealed pages likely still cached); so does a
waiting request of a better priority. Pages that drafting levels hold are no reason to wait or to preempt: those held for waiting requests
are taken back first, then, to let a sequence grow, those for running ones. The first in line always fits, so the queue always moves.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mlsdc.runtime.errors import CapacityError
from mlsdc.runtime.kv_pool import KvPool
from mlsdc.runtime.pacing import ChunkPacer
from mlsdc.runtime.request import Request, StepItem
from mlsdc.runtime.step import Limits


class Scheduler:
    """Requests waiting and running; owns the pool's tables through them. Not thread-safe: the engine's step owns it."""

    def __init__(self, limits: Limits, pool: KvPool) -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: list[Request] = []  # both in the order of service
        self.running: list[Request] = []
        self.max_running = _max_running(limits)
        self.pacer = ChunkPacer()
        self._last: list[StepItem] = []  # of the last step, if it is paced

    def restrict(self, *, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None,
                 max_stretch: float | None = None) -> None:
        """Serve with less than was compiled for; before the first request. Raises CapacityError, naming the limit.

        `max_stretch`: how many plain steps a step with prompt rows may take while others decode (runtime/pacing.py).
        """
        if max_stretch is not None:
            if max_stretch < 1:
                raise CapacityError(f"max_stretch: {max_stretch}, expected at least 1")
            self.pacer = ChunkPacer(max_stretch)
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value is None:
                continue
            compiled = getattr(self.limits, name)
            if not 1 <= value <= compiled:
                raise CapacityError(f"{name}: {value}, expected 1 to {compiled}: the artifact was compiled for limits.{name} {compiled}")
            self.limits = replace(self.limits, **{name: value})
        self.max_running = _max_running(self.limits)

    def pages_needed(self, max_length: int, budget: int) -> int:
        """Pages a sequence owns at most. The keys of its very last token are never needed."""
        return self.pool.pages_for(max_length - 1) + self._scratch(budget)

    def ever_fits(self, max_length: int, budget: int) -> bool:
        """Whether a sequence can be served at all, if it has the pool to itself."""
        return self.pool.can_ever_hold(max_length - 1, self._scratch(budget))

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=Request.turn)

    def remove(self, request: Request) -> None:
        """Forget a request, finished or aborted, wherever it is, and free its pages; forks that waited for it go on without it."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request.parent is not None and request in request.parent.forks:
            request.parent.forks.remove(request)
        self._release_forks(request)
        self.pool.free(request.table)
        if not self.running:
            self.pacer.rest()

    def requests(self) -> Iterator[Request]:
        for request in (*self.running, *self.waiting):
            yield request
            yield from request.forks

    def schedule(self) -> list[StepItem]:
        """The next step's items, none if there is nothing to do. Decoding items come first; pages for all of their rows are there."""
        for request in self.running:
            if request.forks and request.num_computed >= request.num_prompt - 1:
                self._release_forks(request)
        self._make_way()
        rows = self.limits.max_num_batched_tokens
        outs = self.limits.max_logit_rows
        items = self._decode()
        rows -= len(items)
        outs -= len(items)
        drafted = self._share_drafts(items, min(rows, outs))
        rows -= drafted
        outs -= drafted
        decoding = len(items)
        if decoding:
            rows = self.pacer.limit(rows)
        for request in self.running:
            if request.decoding:
                continue
            if item := self._chunk(request, rows, outs):
                items.append(item)
                rows -= item.rows
                outs -= item.logit_rows
        while rows > 0 and self.waiting:
            request = self.waiting[0]
            if not self._admit(request):
                break
            if item := self._chunk(request, rows, outs):
                items.append(item)
                rows -= item.rows
                outs -= item.logit_rows
        if self.pacer.stretch is not None:
            drafted = any(item.tree for item in self._last)
            self.pacer.step(time.perf_counter(), sum(item.rows for item in items[decoding:]), decoding=decoding > 0, drafted=drafted)
            self._last = items
        return items

    def _decode(self) -> list[StepItem]:
        """One row for each decoding sequence, first in line first, preempting the last where pages are short."""
        items: list[StepItem] = []
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if request.decoding:
                if self.pool.is_settled(request.table, len(request.tokens)):  # most steps of most sequences
                    items.append(StepItem(request, 1, decodes=True))
                    index += 1
                    continue
                while not self.pool.can_append(request.table, len(request.tokens), request.num_computed):
                    if not self._reclaim(self.waiting) and not self._reclaim(self.running) and self._preempt_last() is request:
                        return items
                self.pool.append(request.table, len(request.tokens), request.num_computed)
                items.append(StepItem(request, 1, decodes=True))
            index += 1
        return items

    def _share_drafts(self, items: list[StepItem], spare: int) -> int:
        """Set the items' node budgets, equal shares of `spare` rows; no sequence is preempted for a draft. Returns their sum."""
        prompts = len(self.running) > len(items)
        if self.pacer.stretch is not None and (prompts or (self.waiting and self._can_admit(self.waiting[0]))):
            return 0  # their rows make the step as long as it may be
        if self.waiting or prompts:
            spare //= 2
        total = 0
        for i, item in enumerate(items):
            request = item.request
            if not request.wish:
                continue
            # a draft deeper than what may still be committed is wasted: the choice after it is one token more
            budget = min(request.wish, (spare - total) // (len(items) - i), request.max_length - len(request.tokens) - 1)
            if budget > 0 and self.pool.can_append(request.table, len(request.tokens) + budget, request.num_computed):
                self.pool.append(request.table, len(request.tokens) + budget, request.num_computed)
                item.budget = budget
                total += budget
        return total

    def _chunk(self, request: Request, rows: int, outs: int) -> StepItem | None:
        """The next committed rows of a prompt; the last one waits for a step with a logit row to spare."""
        left = len(request.tokens) - request.num_computed
        count = min(left, rows)
        if request.wants_prompt_logprobs:
            count = min(count, outs)
        elif count == left and outs == 0:
            count -= 1
        if count <= 0:
            return None
        count = self.pool.chunk(request.num_computed, count, len(request.tokens))
        self.pool.prepare(request.table, request.num_computed, request.num_computed + count)
        return StepItem(request, count, decodes=False)

    def _make_way(self) -> None:
        """Preempt the last in line while the first waiting request is of a better priority and has no place."""
        while self.waiting and self.running and self.waiting[0].priority < self.running[-1].priority:
            if self._can_admit(self.waiting[0]):
                return
            if not self._reclaim(self.waiting):
                self._preempt_last()

    def _can_admit(self, request: Request) -> bool:
        if len(self.running) >= self.max_running:
            return False
        parent = self._forkable(request)
        if parent is not None:
            return self.pool.can_fork(parent.table, request.num_prompt - 1, parent.num_computed, self._scratch(request.budget))
        return self.pool.can_allocate(self._reusable(request), self._first_room(request), self._scratch(request.budget))

    def _admit(self, request: Request) -> bool:
        """Move the first waiting request to the running ones, with pages; False if it must wait."""
        while not self._can_admit(request):
            if not self._reclaim(self.waiting):
                return False
        pool, scratch = self.pool, self._scratch(request.budget)
        parent = self._forkable(request)
        if parent is not None:
            shared = request.num_prompt - 1
            request.table = pool.fork(parent.table, shared, scratch)
            pool.append(request.table, request.num_prompt, shared)
        else:
            request.table = pool.allocate(self._reusable(request), self._first_room(request), scratch)
        request.num_computed = request.table.num_cached
        request.statistics.cached_tokens += request.num_computed
        if request.timings.admitted is None:
            request.timings.admitted = time.perf_counter()
        self.waiting.remove(request)
        insort(self.running, request, key=Request.turn)
        return True

    def _forkable(self, request: Request) -> Request | None:
        """The running request whose prompt's pages this one can share, if it has not begun."""
        parent = request.parent
        if parent is None or parent not in self.running or len(request.tokens) > request.num_prompt:
            return None
        shared = request.num_prompt - 1
        return parent if parent.num_computed >= shared and self.pool.can_share(parent.table, shared, parent.num_computed) else None

    def _first_room(self, request: Request) -> int:
        return max(len(request.tokens), min(len(request.tokens) + 1, request.max_length - 1))

    def _reusable(self, request: Request) -> Sequence[int]:
        """The tokens whose pages may be known already."""
        return () if request.wants_prompt_logprobs else request.tokens

    def _release_forks(self, request: Request) -> None:
        """The prompt is computed, or its request is gone: its forks wait like any other request."""
        for fork in request.forks:
            self.add(fork)
        request.forks = []

    def _preempt_last(self) -> Request:
        request = self.running.pop()
        self.pool.free(request.table)
        request.num_computed = 0
        request.statistics.preemptions += 1
        self.add(request)
        return request

    def _reclaim(self, requests: Sequence[Request]) -> bool:
        """Drafting levels give back what they hold for one of the requests, the last in line that they hold pages for."""
        return any(request.drafter is not None and request.drafter.release() for request in reversed(requests))

    def _scratch(self, budget: int) -> int:
        return self.limits.scratch_pages(self.pool.scratch_page_size) if budget else 0


def _max_running(limits: Limits) -> int:
    return min(limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_logit_rows)
