"""The pages of one level: who owns which, what can be reused, and what is left.

A page is free (in the free list), *cached* (nobody owns it, but its tokens are known and a later prompt may reuse it), or *owned*
(by one or more sequences). Reuse goes by chains of full pages: a page is known by the page before it and its own tokens, compared in
full, so two prompts that differ anywhere before a page never share it. Shared pages are full, and full pages are never written again:
so a sequence needs no copy-on-write before it writes, only forks of a running sequence will.

A sequence also owns its scratch slab: the pages drafted rows are written to (law L3).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlsdc.runtime.errors import CapacityError

ROOT = 0  # the chain before the first page


@dataclass(eq=False)
class PageTable:
    """What one sequence owns. `num_cached` positions were found in the pool at allocation and need no computing."""

    pages: list[int] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_sealed: int = 0  # leading pages whose tokens are known to the pool's chains
    chain: int = ROOT  # the chain that ends with the last sealed page


class KvPool:
    """`num_pages` pages of `page_size` tokens. Not thread-safe: the engine's step owns it."""

    def __init__(self, num_pages: int, page_size: int, *, reuse: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.reuse = reuse
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages  # sequences that hold each page
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (chain before, tokens) -> (page, chain)
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}  # page -> its entry in `_known`
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages, least recently used first
        self._next_chain = ROOT + 1

    @property
    def num_available(self) -> int:
        """Pages that can be handed out: free or cached."""
        return len(self._free) + len(self._idle)

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
        return table

    def can_append(self, table: PageTable, room: int) -> bool:
        return self.pages_for(room) - len(table.pages) <= self.num_available

    def append(self, table: PageTable, room: int) -> None:
        """Grow the table to `room` positions. Raises CapacityError, changing nothing."""
        if not self.can_append(table, room):
            raise CapacityError(f"kv pool: no room for {room} tokens: {self.num_available} of {self.num_pages} pages left")
        while len(table.pages) < self.pages_for(room):
            table.pages.append(self._take())

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
        table.pages, table.scratch, table.num_sealed, table.chain, table.num_cached = [], [], 0, ROOT, 0

    def free_pages(self) -> list[int]:
        """Pages nobody owns and no chain knows; their bytes mean nothing (tests poison them)."""
        return list(self._free)

    def check_integrity(self, tables: Sequence[PageTable]) -> None:
        """free + cached + owned = total, and every page is owned exactly as often as the given tables (all there are) say.

        Raises CapacityError, naming the first page that is not.
        """
        owners = [0] * self.num_pages
        for table in tables:
            for page in (*table.pages, *table.scratch):
                owners[page] += 1
        for page in range(self.num_pages):
            if owners[page] != self._owners[page]:
                raise CapacityError(f"kv pool: page {page} is in {owners[page]} tables but counted {self._owners[page]} times")
        num_owned = sum(1 for count in owners if count)
        free, idle = set(self._free), set(self._idle)
        if len(free) != len(self._free) or free & idle or any(owners[page] for page in free | idle):
            raise CapacityError("kv pool: a page is in two states at once")
        if len(free) + len(idle) + num_owned != self.num_pages:
            raise CapacityError(f"kv pool: {len(free)} free + {len(idle)} cached + {num_owned} owned, expected {self.num_pages}")
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
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._known[self._key.pop(page)]
        self._owners[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._owners[page] -= 1
        if self._owners[page]:
            return
        if page in self._key:
            self._idle[page] = None
        else:
            self._free.append(page)
