"""The pages of one level: who owns which, what can be reused, and what is left.

A page is free (in the free list), *cached* (nobody owns it, but its tokens are known and a later prompt may reuse it), or *owned*
(by one or more sequences). Reuse goes by chains of full pages: a page is known by the page before it and its own tokens, compared in
full, so two prompts that differ anywhere before a page never share it. Known pages are full, and full pages are never written again.
A fork shares its parent's last page too, which is not full: whoever writes first copies it (`append`).

A sequence also owns its scratch slab: the pages drafted rows are written to (law L3). Pages come from slabs that levels lend each other
(slabs.py); a slab is asked for when the free list is empty, before cached pages go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlsdc.runtime.errors import CapacityError
from mlsdc.runtime.slabs import SlabPool

ROOT = 0  # the chain before the first page
CopyPage = Callable[[int, int], None]  # (source, target)


@dataclass(eq=False)
class PageTable:
    """What one sequence owns. `num_cached` positions were found in the pool at allocation and need no computing."""

    pages: list[int] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_sealed: int = 0  # leading pages whose tokens are known to the pool's chains
    chain: int = ROOT  # the chain that ends with the last sealed page
    forked: bool = False  # its last pages may be shared, and must be copied before they are written


def _no_copy(source: int, target: int) -> None:
    """Where nothing lies behind the pages."""


class KvPool:
    """One level's pages of `page_size` tokens and `page_bytes` bytes. Not thread-safe: the engine's step owns it.

    `copy_page` copies a page's bytes on the device, at once; no step may be running.
    """

    def __init__(self, slabs: SlabPool, page_size: int, page_bytes: int, *, copy_page: CopyPage = _no_copy, reuse: bool = True) -> None:
        cuts = [len(slabs.pages(slab, page_bytes)) for slab in range(slabs.num_slabs)]
        if not cuts or not min(cuts):
            raise CapacityError(f"kv pool: {slabs.num_slabs} slabs of {slabs.slab_bytes} bytes, expected room for a page of {page_bytes}")
        self.page_size = page_size
        self.page_bytes = page_bytes
        self.num_pages = sum(cuts)  # if it had every slab
        self.reuse = reuse
        self.slabs: dict[int, range] = {}  # those this level holds, and their pages
        self._source = slabs
        self._least_cut, self._most_cut = min(cuts), max(cuts)
        self._copy = copy_page
        self._free: list[int] = []
        self._owners = [0] * (slabs.pages(slabs.num_slabs - 1, page_bytes)[-1] + 1)  # sequences that hold each page
        self._tables: dict[PageTable, None] = {}  # those that own pages
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (chain before, tokens) -> (page, chain)
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}  # page -> its entry in `_known`
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages, least recently used first
        self._next_chain = ROOT + 1
        slabs.levels.append(self)

    @classmethod
    def alone(cls, num_pages: int, page_size: int, *, copy_page: CopyPage = _no_copy, reuse: bool = True) -> KvPool:
        """The pool of a device with one level: all its pages are one slab."""
        return cls(SlabPool(1, num_pages), page_size, 1, copy_page=copy_page, reuse=reuse)

    @property
    def num_available(self) -> int:
        """Pages that can be handed out: free, cached, or in slabs that can be had."""
        return len(self._free) + len(self._idle) + self._source.num_claimable(self) * self._least_cut

    @property
    def num_spare_slabs(self) -> int:
        """Slabs `surrender` can empty."""
        return (len(self._free) + len(self._idle)) // self._most_cut

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def lookup(self, tokens: Sequence[int]) -> list[int]:
        """Pages that already hold the longest known prefix of `tokens`, of full pages, at least one token being left to compute."""
        return self._find(tokens)[0]

    def can_allocate(self, tokens: Sequence[int], room: int, num_scratch: int = 0) -> bool:
        """Whether `allocate` with the same arguments would succeed."""
        hits = self.lookup(tokens)
        idle_hits = sum(1 for page in hits if not self._owners[page])
        return self.pages_for(max(room, len(tokens))) - len(hits) + num_scratch <= self.num_available - idle_hits

    def allocate(self, tokens: Sequence[int], room: int, num_scratch: int = 0) -> PageTable:
        """Pages for max(room, len(tokens)) positions, known ones first, and a scratch slab. Raises CapacityError, changing nothing."""
        if not self.can_allocate(tokens, room, num_scratch):
            raise CapacityError(
                f"kv pool: no room for {max(room, len(tokens))} tokens: {self.num_available} of {self.num_pages} pages left")
        hits, chain = self._find(tokens)
        for page in hits:
            self._own(page)
        table = PageTable(list(hits), [], len(hits) * self.page_size, len(hits), chain)
        table.pages += (self._take() for _ in range(self.pages_for(max(room, len(tokens))) - len(hits)))
        table.scratch += (self._take() for _ in range(num_scratch))
        self._tables[table] = None
        return table

    def fork(self, parent: PageTable, num_tokens: int, num_scratch: int = 0) -> PageTable:
        """A table that shares the parent's pages of its first `num_tokens` positions, with a scratch slab of its own.

        Whoever writes into the last of them first copies it. Raises CapacityError, changing nothing.
        """
        if num_scratch > self.num_available:
            raise CapacityError(f"kv pool: no room for a fork: {self.num_available} of {self.num_pages} pages left")
        table = PageTable(parent.pages[: self.pages_for(num_tokens)], num_cached=num_tokens, forked=True)
        parent.forked = True
        for page in table.pages:
            self._own(page)
        if parent.num_sealed * self.page_size <= num_tokens:  # else `seal` finds the chain again, from the start
            table.num_sealed, table.chain = parent.num_sealed, parent.chain
        self._tables[table] = None
        table.scratch += (self._take() for _ in range(num_scratch))
        return table

    def can_append(self, table: PageTable, room: int, written: int) -> bool:
        """Whether `append` with the same arguments would succeed."""
        needed = max(0, self.pages_for(room) - len(table.pages)) + (len(self._shared(table, written)) if table.forked else 0)
        return needed == 0 or needed <= self.num_available

    def append(self, table: PageTable, room: int, written: int) -> None:
        """Grow the table to `room` positions, those from `written` on being its own to write: shared pages there are copied.

        Raises CapacityError, changing nothing.
        """
        if not self.can_append(table, room, written):
            raise CapacityError(f"kv pool: no room for {room} tokens: {self.num_available} of {self.num_pages} pages left")
        if table.forked:
            for i in self._shared(table, written):
                page = self._take()
                self._copy(table.pages[i], page)
                self._release(table.pages[i])
                table.pages[i] = page
            table.forked = False  # what lies before is full
        while len(table.pages) < self.pages_for(room):
            table.pages.append(self._take())

    def trim(self, table: PageTable, room: int) -> None:
        """Give back the pages beyond `room` positions: those a draft was given and did not need."""
        while len(table.pages) > self.pages_for(room):
            self._release(table.pages.pop())

    def _shared(self, table: PageTable, written: int) -> list[int]:
        """Places in the table, from position `written` on, of pages that others own or the chains know."""
        pages = table.pages
        return [
            i for i in range(written // self.page_size, len(pages)) if self._owners[pages[i]] > 1 or pages[i] in self._key]

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
            if known is None:
                page = table.pages[table.num_sealed]
                known = self._known[key] = (page, self._next_chain)
                self._key[page] = key
                self._next_chain += 1
            table.num_sealed += 1
            table.chain = known[1]

    def free(self, table: PageTable) -> None:
        """Give everything back; sealed pages stay cached until their room is needed. The table is empty afterwards."""
        for page in reversed(table.pages):  # the end of a chain is worth least: it goes first
            self._release(page)
        for page in table.scratch:
            self._release(page)
        table.pages, table.scratch, table.num_sealed, table.chain, table.num_cached, table.forked = [], [], 0, ROOT, 0, False
        self._tables.pop(table, None)

    def surrender(self) -> int:
        """Empty the slab with the fewest owned pages and give it up; `num_spare_slabs` says whether that can be done.

        Its cached pages are forgotten, its owned ones move to free pages elsewhere, or to cached ones, the least recently used first.
        """
        slab = min(self.slabs, key=lambda slab: sum(self._owners[page] > 0 for page in self.slabs[slab]))  # fewest copies
        leaving = self.slabs.pop(slab)
        self._free = [page for page in self._free if page not in leaving]
        for page in leaving:
            if page in self._idle:
                del self._idle[page]
                del self._known[self._key.pop(page)]
        moved = {page: self._move(page) for page in leaving if self._owners[page]}
        if moved:
            for table in self._tables:
                table.pages[:] = [moved.get(page, page) for page in table.pages]
                table.scratch[:] = [moved.get(page, page) for page in table.scratch]
        return slab

    def _move(self, page: int) -> int:
        new = self._free.pop() if self._free else self._evict()
        self._copy(page, new)
        self._owners[new], self._owners[page] = self._owners[page], 0
        if page in self._key:
            key = self._key[new] = self._key.pop(page)
            self._known[key] = (new, self._known[key][1])
        return new

    def free_pages(self) -> list[int]:
        """Pages of this level's slabs nobody owns and no chain knows; their bytes mean nothing (tests poison them)."""
        return list(self._free)

    def check_integrity(self, tables: Sequence[PageTable]) -> None:
        """free + cached + owned = total, and every page is owned exactly as often as the given tables (all there are) say.

        Raises CapacityError, naming the first page that is not.
        """
        owners = [0] * len(self._owners)
        for table in tables:
            for page in (*table.pages, *table.scratch):
                owners[page] += 1
        for page, count in enumerate(owners):
            if count != self._owners[page]:
                raise CapacityError(f"kv pool: page {page} is in {count} tables but counted {self._owners[page]} times")
        self._source.check_integrity()
        held = {page for pages in self.slabs.values() for page in pages}
        owned = {page for page, count in enumerate(owners) if count}
        free, idle = set(self._free), set(self._idle)
        if len(free) != len(self._free) or free & idle or (free | idle) & owned:
            raise CapacityError("kv pool: a page is in two states at once")
        if free | idle | owned != held:
            raise CapacityError(f"kv pool: {len(free)} free + {len(idle)} cached + {len(owned)} owned, expected {len(held)}")
        if any(table not in self._tables for table in tables if table.pages or table.scratch):
            raise CapacityError("kv pool: a table owns pages and is not known")
        if any(page not in self._key for page in idle) or any(self._known[key][0] != page for page, key in self._key.items()):
            raise CapacityError("kv pool: a cached page is not known by its tokens")
        for table in tables:
            for page in table.scratch:
                if owners[page] != 1 or page in self._key:
                    raise CapacityError(f"kv pool: scratch page {page} is shared")

    def _find(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        pages: list[int] = []
        chain = ROOT
        size = self.page_size
        if not self.reuse or not self._known:
            return pages, chain
        while (start := len(pages) * size) + size < len(tokens):
            known = self._known.get((chain, tuple(tokens[start : start + size])))
            if known is None:
                break
            pages.append(known[0])
            chain = known[1]
        return pages, chain

    def _own(self, page: int) -> None:
        self._idle.pop(page, None)
        self._owners[page] += 1

    def _take(self) -> int:
        if not self._free:
            slab = self._source.take_free()
            if slab is None and not self._idle:
                slab = self._source.claim(self)
            if slab is not None:
                self.slabs[slab] = self._source.pages(slab, self.page_bytes)
                self._free += reversed(self.slabs[slab])
        page = self._free.pop() if self._free else self._evict()
        self._owners[page] = 1
        return page

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._known[self._key.pop(page)]
        return page

    def _release(self, page: int) -> None:
        self._owners[page] -= 1
        if self._owners[page]:
            return
        if page in self._key:
            self._idle[page] = None
        else:
            self._free.append(page)
