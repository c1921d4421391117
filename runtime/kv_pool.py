"""The pages of one level: who owns which, what can be reused, and what is left.

Reuse goes by chains of full pages (known_pages.py). Known pages are full, and full pages are never written again. A fork shares its
parent's last page too, which is not full: whoever writes first copies it (`append`).

A sequence also owns its scratch slab: the pages drafted rows are written to (law L3). Pages come from slabs that levels lend each other
(slabs.py); a slab is asked for when the free list is empty, before cached pages go.

A level of a grouped format has wide pages beside (wide_pages.py): scratch slabs and tails lie in them, and a prefix is reused up to the
last page boundary whose tail was kept. A page that is not full holds nothing then, so forks get a fresh one instead of a copy.

A level with a window (kv_window.py) gives pages back that no later row reads: sequences hold the sinks and the window, not their length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlsdc.runtime.errors import CapacityError
from mlsdc.runtime.known_pages import KnownPages
from mlsdc.runtime.kv_tables import ROOT, PageTable
from mlsdc.runtime.kv_window import KvWindow
from mlsdc.runtime.pages import CopyPage, Pages, no_copy
from mlsdc.runtime.slabs import SlabPool
from mlsdc.runtime.wide_pages import WidePages

__all__ = ["KvPool", "PageTable"]

CHECKPOINT_TOKENS = 512  # a long prompt's tail is kept at every multiple, where that is a page boundary


class KvPool(KnownPages):
    """One level's pages of `page_size` tokens and `page_bytes` bytes, and its wide pages, if its format is a grouped one."""

    def __init__(self, slabs: SlabPool, page_size: int, page_bytes: int, *, copy_page: CopyPage = no_copy, reuse: bool = True,
                 wide: WidePages | None = None, window: KvWindow | None = None, most_rows: int = 0) -> None:
        """`most_rows`: of a sequence in one step; a pool with a window wants to know."""
        super().__init__(slabs, page_size, page_bytes, copy_page=copy_page)
        if wide is not None and wide.tail.group != page_size:
            raise CapacityError(f"kv pool: pages of {page_size} tokens, groups of {wide.tail.group}: a group is a page")
        self.reuse = reuse
        self.wide = wide
        self.window = window
        self.most_rows = most_rows
        self._tables: dict[PageTable, None] = {}  # those that own pages
        if wide is not None:
            wide.tables = self._tables

    @classmethod
    def alone(cls, num_pages: int, page_size: int, *, copy_page: CopyPage = no_copy, reuse: bool = True) -> KvPool:
        """The pool of a device with one level: all its pages are one slab."""
        return cls(SlabPool(1, num_pages), page_size, 1, copy_page=copy_page, reuse=reuse)

    @property
    def scratch_page_size(self) -> int:
        """Tokens of a page of a scratch slab."""
        return self.wide.tail.page_size if self.wide else self.page_size

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def can_ever_hold(self, num_tokens: int, num_scratch: int) -> bool:
        """Whether one sequence of so many cached tokens fits, if it has the whole pool to itself."""
        return self._fits_alone(self._first(num_tokens, 0), num_scratch)

    def lookup(self, tokens: Sequence[int]) -> list[int]:
        """Pages that already hold the longest known prefix of `tokens`, of full pages, at least one token being left to compute."""
        return self._find(tokens)[0]

    def can_allocate(self, tokens: Sequence[int], room: int, num_scratch: int = 0) -> bool:
        """Whether `allocate` with the same arguments would succeed."""
        hits, _, room = self._start(tokens, max(room, len(tokens)), num_scratch)
        idle_hits = sum(1 for page in hits if not self._owners[page])
        needs = self._needs(self.pages_for(room) - len(hits), num_scratch, room)
        needs[self] += idle_hits
        return self.source.can_take(needs)

    def allocate(self, tokens: Sequence[int], room: int, num_scratch: int = 0) -> PageTable:
        """Pages for max(room, len(tokens)) positions, known ones first, and a scratch slab. Raises CapacityError, changing nothing.

        With a window: pages that are enough to go there step by step.
        """
        if not self.can_allocate(tokens, room, num_scratch):
            raise self._full(f"{max(room, len(tokens))} tokens")
        goal = max(room, len(tokens))
        hits, chain, room = self._start(tokens, goal, num_scratch)
        for page in hits:
            self._own(page)
        cached = len(hits) * self.page_size
        table = PageTable(list(hits), num_cached=cached, num_sealed=len(hits), chain=chain, num_first=len(tokens), checkpoint=cached,
                          goal=goal)
        self._tables[table] = None
        asleep = self.wide.num_asleep(chain) if self.wide and hits else 0
        with self.source.reserving(self._needs(self.pages_for(room) - len(hits), num_scratch, room, asleep)):
            if self.wide is not None and hits:
                self.wide.restore(chain, table, cached)
            self._fill(table, room, num_scratch, cached)
        return table

    def can_share(self, parent: PageTable, num_tokens: int, written: int) -> bool:
        """Whether the first `num_tokens` positions of a parent that has `written` tokens can still be read by a fork."""
        if not self.reaches(parent, num_tokens):
            return False
        return self.wide is None or (num_tokens >= parent.num_cached and self.wide.tail.covers(written, num_tokens))

    def can_fork(self, parent: PageTable, num_tokens: int, written: int, num_scratch: int = 0) -> bool:
        """Whether `fork` would succeed while the parent has `written` tokens, and an `append` of one token after it."""
        return self.can_share(parent, num_tokens, written) and self.source.can_take(self._fork_and_one(num_scratch))

    def fork(self, parent: PageTable, num_tokens: int, num_scratch: int = 0) -> PageTable:
        """A table that shares the parent's pages of its first `num_tokens` positions, with a scratch slab of its own.

        Whoever writes into the last of them first copies it. Raises CapacityError, changing nothing.
        """
        needs = self._needs(0, num_scratch, num_tokens)
        if not self.source.can_take(needs):
            raise self._full("a fork")
        following = self._fork_and_one(num_scratch)  # no other level may take what the `append` after it needs
        table = PageTable(parent.pages[: self.pages_for(num_tokens)], num_cached=num_tokens, forked=True, num_first=num_tokens,
                          checkpoint=num_tokens // self.page_size * self.page_size, gap_start=parent.gap_start, gap_end=parent.gap_end)
        parent.forked = True
        for page in table.owned:
            self._own(page)
        if parent.num_sealed * self.page_size <= num_tokens:  # else `seal` finds the chain again, from the start
            table.num_sealed, table.chain = parent.num_sealed, parent.chain
        self._tables[table] = None
        with self.source.reserving(following if self.source.can_take(following) else needs):
            self._fill(table, num_tokens, num_scratch, num_tokens)
            if self.wide is not None:
                self.wide.copy_tail(parent, table, num_tokens)
        return table

    def is_settled(self, table: PageTable, room: int) -> bool:
        """Whether `append` to `room` positions would do nothing."""
        return self.window is None and self._has_room(table, room)

    def can_append(self, table: PageTable, room: int, written: int) -> bool:
        """Whether `append` with the same arguments would succeed."""
        if self._has_room(table, room):
            return True
        needs = self._growth(table, room, written)
        return not any(needs.values()) or self.source.can_take(needs)

    def append(self, table: PageTable, room: int, written: int) -> None:
        """Grow the table to `room` positions, those from `written` on being its own to write: shared pages there are copied.

        With a window the pages that rows from `written` on do not read are given back first. Raises CapacityError, having taken nothing.
        """
        self._slide(table, written)
        if self._has_room(table, room):
            return
        needs = self._growth(table, room, written)
        if any(needs.values()) and not self.source.can_take(needs):
            raise self._full(f"{room} tokens")
        with self.source.reserving(needs):
            if table.forked:
                for i in self._shared(table, written):
                    page = self._take()
                    if self.wide is None:
                        self._copy(table.pages[i], page)
                    self._release(table.pages[i])
                    table.pages[i] = page
                table.forked = False  # what lies before is full
            self._fill(table, room, 0, written)

    def hold(self, table: PageTable, room: int, num_scratch: int, written: int = 0) -> tuple[PageTable, bool]:
        """A drafting level's table with `room` positions of its own, a new one if it is empty; False if there is no room.

        With a window: with what is enough to `slide` there from position `written` on.
        """
        if not table.pages:
            if not self.can_allocate((), room, num_scratch):
                return table, False
            table = self.allocate((), room, num_scratch)
        table.goal = room
        room = self._first(room, written)
        self._slide(table, written)
        if not self.can_append(table, room, written):
            return table, False
        self.append(table, room, written)
        return table, True

    def prepare(self, table: PageTable, start: int, end: int) -> None:
        """Positions start .. end - 1, which the table has room for, are about to be written as committed rows. Never fails."""
        if self.window is not None:
            self.slide(table, start, end)
        elif self.wide is not None:
            self.wide.grow(table, start, end)

    def slide(self, table: PageTable, written: int, room: int) -> None:
        """`append` without asking anybody: for each page that rows from `written` on do not read the table gets one further ahead.

        The table was allocated for more than `room` positions, and has written all before `written` in steps of at most `most_rows`.
        """
        spare = self._slide(table, written)
        goal = self.pages_for(self._first(table.goal, written))
        for _ in range(min(spare, goal - len(table.pages))):
            table.pages.append(self._take())
        self.append(table, room, written)

    def reaches(self, table: PageTable, query: int) -> bool:
        """Whether all that a row at position `query` reads is still there."""
        return self.window is None or table.gap_end <= self.window.gap(query, self.page_size)[1]

    def chunk(self, start: int, count: int, total: int) -> int:
        """How many of `count` rows from position `start` on a step is to compute of a prompt of `total` tokens, so that the tail can be
        kept at its last page boundary and at every multiple of CHECKPOINT_TOKENS."""
        if self.wide is None or not self.reuse:
            return count
        last = total // self.page_size * self.page_size
        every = range(-(-(start + 1) // CHECKPOINT_TOKENS) * CHECKPOINT_TOKENS, start + count, CHECKPOINT_TOKENS)
        for boundary in sorted({*every, last}):
            cut: int = boundary - start
            if 0 < cut < count and not self.wide.tail.covers(start + count, boundary):
                return cut
        return count

    def trim(self, table: PageTable, room: int) -> None:
        """Give back the pages beyond `room` positions: those a draft was given and did not need."""
        while len(table.pages) > self.pages_for(room):
            self._release(table.pages.pop())

    def seal(self, table: PageTable, tokens: Sequence[int], num_written: int) -> None:
        """The first `num_written` of `tokens` are in the pages for good: make the full ones reusable.

        Where another sequence was first with the same tokens, its page stays the known one and this sequence keeps its own.
        """
        if not self.reuse:
            return
        size = self.page_size
        while (start := table.num_sealed * size) + size <= num_written:
            key = (table.chain, tuple(tokens[start : start + size]))
            known = self._known.get(key)
            if known is None and table.num_sealed < table.gap_end and table.num_sealed >= table.gap_start:
                return  # a fork's page that was given back and forgotten: what follows it can not be found either
            if known is None:
                known = self._enter(key, table.pages[table.num_sealed])
            table.num_sealed += 1
            table.chain = known[1]
        if self.wide is not None and table.num_sealed * size > table.checkpoint:
            self._keep_tail(self.wide, table, num_written)

    def free(self, table: PageTable) -> None:
        """Give everything back; sealed pages stay cached until their room is needed. The table is empty afterwards."""
        for page in reversed(table.owned):  # the end of a chain is worth least: it goes first
            self._release(page)
        wide = self.wide or self
        for page in (*table.scratch, *table.tail):
            wide._release(page)
        table.clear()
        self._tables.pop(table, None)

    def check_integrity(self, tables: Sequence[PageTable]) -> None:
        """free + cached + owned = total, and every page is owned exactly as often as the given tables (all there are) say.

        Raises CapacityError, naming the first page that is not.
        """
        self.check_counts(page for table in tables for page in ((*table.owned,) if self.wide else (*table.owned, *table.scratch)))
        if any(table not in self._tables for table in tables if table.pages or table.scratch):
            raise CapacityError("kv pool: a table owns pages and is not known")
        if any(page not in self._key for page in self._idle) or any(self._known[key][0] != page for page, key in self._key.items()):
            raise CapacityError("kv pool: a cached page is not known by its tokens")
        if self.wide is not None:
            self.wide.check(tables)
            return
        for table in tables:
            if set(table.pages[table.gap_start : table.gap_end]) - set(table.pages[max(0, table.gap_start - 1) : table.gap_start]):
                raise CapacityError(f"kv pool: pages {table.gap_start} to {table.gap_end - 1} of a table were given back and are named")
            for page in table.scratch:
                if self._owners[page] != 1 or page in self._key:
                    raise CapacityError(f"kv pool: scratch page {page} is shared")

    # --- how much, and of what ---

    def _needs(self, num_pages: int, num_scratch: int, room: int, kept: int = 0) -> dict[Pages, int]:
        """Pages to take: of the level's own, and wide ones for scratch and the tail of `room` tokens, of which `kept` are there."""
        if self.wide is None:
            return {self: num_pages + num_scratch}
        tail = self.wide.tail
        return {self: num_pages, self.wide: num_scratch + min(-(-room // tail.page_size), tail.num_pages) - kept}

    def _fork_and_one(self, num_scratch: int) -> dict[Pages, int]:
        """What a fork takes, and at most an `append` of one token after it."""
        return {self: num_scratch + 1} if self.wide is None else {self: 1, self.wide: num_scratch + self.wide.tail.num_pages}

    def _has_room(self, table: PageTable, room: int) -> bool:
        """Nothing is to be done: most steps of most sequences, so this is looked at first."""
        return not table.forked and self.wide is None and len(table.pages) * self.page_size >= room

    def _growth(self, table: PageTable, room: int, written: int) -> dict[Pages, int]:
        needs: dict[Pages, int] = {
            self: max(0, self.pages_for(room) - len(table.pages)) + (len(self._shared(table, written)) if table.forked else 0)}
        if self.wide is not None:
            needs[self.wide] = self.wide.grow_needs(table, room)
        return needs

    def _fill(self, table: PageTable, room: int, num_scratch: int, written: int) -> None:
        """The pages `_needs` counted, for `room` positions of which those from `written` on are about to be written."""
        while len(table.pages) < self.pages_for(room):
            table.pages.append(self._take())
        wide = self.wide or self
        while len(table.scratch) < num_scratch:
            table.scratch.append(wide._take())
        if self.wide is not None:
            self.wide.grow(table, written, room)

    def _fits_alone(self, room: int, num_scratch: int) -> bool:
        """Whether pages for `room` positions fit, if no other sequence has any."""
        needs = self._needs(self.pages_for(room), num_scratch, room)
        return sum(-(-count // level.least_cut) for level, count in needs.items()) <= self.source.num_slabs

    def _start(self, tokens: Sequence[int], goal: int, num_scratch: int) -> tuple[list[int], int, int]:
        """What a sequence begins with: known pages, the chain they end, and positions to have pages for at once.

        With a window these come on top of the known pages, however many those are: where even the whole pool is too small for both, the
        prefix is computed again, or the sequence would wait for ever.
        """
        hits, chain = self._find(tokens)
        room = self._first(goal, len(hits) * self.page_size)
        if hits and self.window is not None and not self._fits_alone(room, num_scratch):
            return [], ROOT, self._first(goal, 0)
        return hits, chain, room

    def _first(self, room: int, written: int) -> int:
        """Positions to have pages for at once, where `room` are wanted and `written` are there."""
        return room if self.window is None else min(room, self.window.ahead(written, self.most_rows, self.page_size))

    def _slide(self, table: PageTable, written: int) -> int:
        """Give back what rows from `written` on do not read: their entries name the page before the gap. How many nobody else holds."""
        if self.window is None:
            return 0
        start, end = self.window.gap(written, self.page_size)
        first = max(table.gap_end, start)
        if end <= first:
            return 0
        pages = table.pages[first:end]
        table.pages[first:end] = [table.pages[start - 1]] * len(pages)
        table.gap_start, table.gap_end = start, end
        for page in pages:
            self._release(page)
        return sum(not self._owners[page] for page in pages)

    def _full(self, what: str) -> CapacityError:
        left = f"{self.num_available} of {self.num_pages} pages left"
        return CapacityError(f"kv pool: no room for {what}: {left}" + (f", {self.wide.num_available} wide ones" if self.wide else ""))

    def _shared(self, table: PageTable, written: int) -> list[int]:
        """Places in the table, from position `written` on, of pages that others own or the chains know."""
        pages = table.pages
        return [
            i for i in range(written // self.page_size, len(pages)) if self._owners[pages[i]] > 1 or pages[i] in self._key]

    def _keep_tail(self, wide: WidePages, table: PageTable, num_written: int) -> None:
        """A checkpoint at the last sealed page, for good if it is one of `chunk`, else until the next one."""
        boundary, chain = table.num_sealed * self.page_size, table.chain
        kept = boundary % CHECKPOINT_TOKENS == 0 or boundary == table.num_first // self.page_size * self.page_size
        if not wide.tail.covers(num_written, boundary) or not (kept or num_written >= table.num_first):
            return
        made = wide.checkpoint(chain, table, boundary)
        if table.rolling != ROOT:
            wide.drop(table.rolling)
        table.checkpoint, table.rolling = boundary, chain if made and not kept else ROOT

    def _find(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Known pages to begin with, and their chain: of a grouped format as far as a checkpoint."""
        pages, chains = self._longest(tokens) if self.reuse else ([], [ROOT])
        while self.wide is not None and pages and not self.wide.has(chains[-1]):
            pages.pop()
            chains.pop()
        return pages, chains[-1]

    def _forgotten(self, chain: int) -> None:
        if self.wide is not None:
            self.wide.drop(chain)

    def _renamed(self, moved: Mapping[int, int]) -> None:
        for table in self._tables:
            table.pages[:] = [moved.get(page, page) for page in table.pages]
            if self.wide is None:
                table.scratch[:] = [moved.get(page, page) for page in table.scratch]

