"""Which rows the next step computes: continuous batching, decided anew at every step.

Order: (1) every decoding sequence gets its row; (2) what is left of the budgets is shared out as drafted nodes, at most half of it
while prompts wait; (3) prompts of admitted sequences go on in chunks, oldest first; (4) waiting requests are admitted, first come
first served, while pages last. A sequence that cannot grow preempts the youngest one, which is computed again later (with its own
sealed pages likely still cached). The oldest sequence always fits, so the queue always moves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from mlsdc.runtime.kv_pool import KvPool
from mlsdc.runtime.request import Request, StepItem
from mlsdc.runtime.step import Limits


class Scheduler:
    """Requests waiting and running; owns the pool's tables through them. Not thread-safe: the engine's step owns it."""

    def __init__(self, limits: Limits, pool: KvPool) -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_logit_rows)

    def pages_needed(self, max_length: int, budget: int) -> int:
        """Pages a sequence owns at most. The keys of its very last token are never needed."""
        return self.pool.pages_for(max_length - 1) + self._scratch(budget)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, finished or aborted, wherever it is, and free its pages."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.pool.free(request.table)

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def schedule(self) -> list[StepItem]:
        """The next step's items, none if there is nothing to do. Decoding items come first; pages for all of their rows are there."""
        rows = self.limits.max_num_batched_tokens
        outs = self.limits.max_logit_rows
        items = self._decode()
        rows -= len(items)
        outs -= len(items)
        drafted = self._share_drafts(items, min(rows, outs))
        rows -= drafted
        outs -= drafted
        for request in self.running:
            if request.decoding:
                continue
            if item := self._chunk(request, rows, outs):
                items.append(item)
                rows -= item.rows
                outs -= item.wants_choice
        while rows > 0 and self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            if not self._admit(request):
                break
            if item := self._chunk(request, rows, outs):
                items.append(item)
                rows -= item.rows
                outs -= item.wants_choice
        return items

    def _decode(self) -> list[StepItem]:
        """One row for each decoding sequence, oldest first, preempting the youngest where pages are short."""
        items: list[StepItem] = []
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if request.decoding:
                while not self.pool.can_append(request.table, len(request.tokens)):
                    if self._preempt_youngest() is request:
                        return items
                self.pool.append(request.table, len(request.tokens))
                items.append(StepItem(request, 1, decodes=True))
            index += 1
        return items

    def _share_drafts(self, items: list[StepItem], spare: int) -> int:
        """Set the items' node budgets, equal shares of `spare` rows; no sequence is preempted for a draft. Returns their sum."""
        if self.waiting or len(self.running) > len(items):
            spare //= 2
        total = 0
        for i, item in enumerate(items):
            request = item.request
            # a draft deeper than what may still be committed is wasted: the choice after it is one token more
            budget = min(request.budget, (spare - total) // (len(items) - i), request.max_length - len(request.tokens) - 1)
            if budget > 0 and self.pool.can_append(request.table, len(request.tokens) + budget):
                self.pool.append(request.table, len(request.tokens) + budget)
                item.budget = budget
                total += budget
        return total

    def _chunk(self, request: Request, rows: int, outs: int) -> StepItem | None:
        """The next committed rows of a prompt; the last one waits for a step with a logit row to spare."""
        left = len(request.tokens) - request.num_computed
        count = min(left, rows)
        if count == left and outs == 0:
            count -= 1
        return StepItem(request, count, decodes=False) if count > 0 else None

    def _admit(self, request: Request) -> bool:
        scratch = self._scratch(request.budget)
        room = min(len(request.tokens) + 1, request.max_length - 1)
        if not self.pool.can_allocate(request.tokens, room, scratch):
            return False
        request.table = self.pool.allocate(request.tokens, room, scratch)
        request.num_computed = request.table.num_cached
        request.statistics.cached_tokens += request.num_computed
        if request.timings.admitted is None:
            request.timings.admitted = time.perf_counter()
        self.waiting.popleft()
        self.running.append(request)
        return True

    def _preempt_youngest(self) -> Request:
        request = self.running.pop()
        self.pool.free(request.table)
        request.num_computed = 0
        request.statistics.preemptions += 1
        self.waiting.appendleft(request)
        return request

    def _scratch(self, budget: int) -> int:
        return self.limits.scratch_pages(self.pool.page_size) if budget else 0
