"""The 16-bit pages of a level whose cache format quantises groups: scratch slabs, tails of sequences, and checkpoints of tails.

`PageTable.tail` names the wide pages of the first tokens and of each run of slots of the ring (kv_tail.py).

A prefix can be reused up to a page boundary n only together with its first tokens and those from `first_needed(n)` to n in 16 bits: a
*checkpoint*, which holds the wide pages they lie in. Nothing is copied to make one; a sequence that goes on to write a page some checkpoint
holds gets a copy.
Checkpoints are kept while nobody needs their room, the least recently used goes first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from mlsdc.runtime.errors import CapacityError
from mlsdc.runtime.kv_tables import PageTable
from mlsdc.runtime.kv_tail import Tail
from mlsdc.runtime.pages import CopyPage, Pages, no_copy
from mlsdc.runtime.slabs import SlabPool


class WidePages(Pages):
    """One level's wide pages. Owners are scratch slabs and tails; what checkpoints hold beside that is idle."""

    name = "kv tail pool"

    def __init__(self, slabs: SlabPool, page_bytes: int, tail: Tail, *, copy_page: CopyPage = no_copy) -> None:
        super().__init__(slabs, page_bytes, copy_page=copy_page)
        self.tail = tail
        self.tables: Mapping[PageTable, None] = {}  # those that own pages; the level's KvPool sets it
        self._checkpoints: OrderedDict[int, tuple[int, ...]] = OrderedDict()  # chain -> wide pages, least recently used first
        self._held: Counter[int] = Counter()  # checkpoints that hold a page
        self._num_idle = 0

    # --- checkpoints ---

    def has(self, chain: int) -> bool:
        return chain in self._checkpoints

    def checkpoint(self, chain: int, table: PageTable, boundary: int) -> bool:
        """Keep the tail at `boundary`, which the table's ring covers, under its chain. False if it is known already."""
        if chain in self._checkpoints:
            self._checkpoints.move_to_end(chain)
            return False
        pages = tuple(table.tail[place] for place in self.tail.kept(boundary))
        self._checkpoints[chain] = pages
        self._held.update(pages)
        return True

    def restore(self, chain: int, table: PageTable, boundary: int) -> None:
        """Make the checkpoint's pages the tail of a table without one. Those that a table owns already are copied: it may be writing on."""
        self._checkpoints.move_to_end(chain)
        places = self.tail.kept(boundary)
        kept = dict(zip(places, self._checkpoints[chain], strict=True))
        shared = {page for page in kept.values() if self._owners[page]}
        for page in kept.values():
            self._own(page)  # none of them goes while others are taken
        table.tail = [kept[place] if place in kept else self._take() for place in range(max(places) + 1)]
        for place in places:
            if table.tail[place] in shared:
                self._own_copy(table, place)

    def copy_tail(self, parent: PageTable, table: PageTable, length: int) -> None:
        """Give a fork of `length` tokens copies of what it needs of its parent's tail, which the parent may write in this very step."""
        for place in self.tail.kept(length):
            self._copy(parent.tail[place], table.tail[place])

    def drop(self, chain: int) -> None:
        """Forget a checkpoint, if there is one."""
        for page in self._checkpoints.pop(chain, ()):
            self._held[page] -= 1
            if not self._held[page]:
                del self._held[page]
                if not self._owners[page]:
                    self._num_idle -= 1
                    self._free.append(page)

    def num_asleep(self, chain: int) -> int:
        """Pages of the checkpoint that nobody owns: restoring it takes them from what is available."""
        return sum(not self._owners[page] for page in self._checkpoints[chain])

    # --- tails ---

    def grow_needs(self, table: PageTable, room: int) -> int:
        """Pages that `grow` takes, copies aside."""
        return max(0, min(-(-room // self.tail.page_size), self.tail.num_pages) - len(table.tail))

    def grow(self, table: PageTable, written: int, room: int) -> None:
        """A tail for `room` tokens, of which those from `written` on are about to be written: pages that checkpoints hold are copied."""
        for place in self.tail.places(written, room):
            if place < len(table.tail) and self._held[table.tail[place]] and self._copyable(table.tail[place]):
                self._own_copy(table, place)
        while len(table.tail) < min(-(-room // self.tail.page_size), self.tail.num_pages):
            table.tail.append(self._take())

    def _own_copy(self, table: PageTable, place: int) -> None:
        page = table.tail[place]
        table.tail[place] = self._take()
        self._copy(page, table.tail[place])
        self._release(page)

    def _copyable(self, page: int) -> bool:
        """Whether there is a page for a copy; if not, the checkpoints that hold this one are dropped and it is the table's alone."""
        if self.source.can_spare(self):
            return True
        for chain in [chain for chain, pages in self._checkpoints.items() if page in pages]:
            self.drop(chain)
        return False

    # --- what an idle page is ---

    @property
    def num_idle(self) -> int:
        return self._num_idle

    def _is_idle(self, page: int) -> bool:
        return self._held[page] > 0 and not self._owners[page]

    def _rest(self, page: int) -> bool:
        if not self._held[page]:
            return False
        self._num_idle += 1
        return True

    def _wake(self, page: int) -> None:
        if self._is_idle(page):
            self._num_idle -= 1

    def _reclaim(self) -> int:
        while not self._free:
            self.drop(next(iter(self._checkpoints)))
        return self._free.pop()

    def _forget(self, page: int) -> None:
        for chain in [chain for chain, pages in self._checkpoints.items() if page in pages]:
            self.drop(chain)

    def _follow(self, page: int, new: int) -> None:
        if count := self._held.pop(page, 0):
            self._held[new] = count
            for chain, pages in self._checkpoints.items():
                self._checkpoints[chain] = tuple(new if held == page else held for held in pages)

    def _renamed(self, moved: Mapping[int, int]) -> None:
        for table in self.tables:
            table.tail[:] = [moved.get(page, page) for page in table.tail]
            table.scratch[:] = [moved.get(page, page) for page in table.scratch]

    def check(self, tables: Sequence[PageTable]) -> None:
        """Every page is free, idle or owned as the tables (all there are) say, and held as the checkpoints say. Raises CapacityError."""
        self.check_counts(page for table in tables for page in (*table.tail, *table.scratch))
        held = Counter(page for pages in self._checkpoints.values() for page in pages)
        if held != self._held:
            raise CapacityError(f"{self.name}: checkpoints hold {sum(held.values())} pages, counted {sum(self._held.values())}")
        for table in tables:
            if len(table.tail) > self.tail.num_pages:
                raise CapacityError(f"{self.name}: a tail of {len(table.tail)} pages, expected at most {self.tail.num_pages}")
            for page in (*table.tail, *table.scratch):
                if self._owners[page] != 1:
                    raise CapacityError(f"{self.name}: page {page} is in {self._owners[page]} tails or scratch slabs, expected 1")
            for page in table.scratch:
                if self._held[page]:
                    raise CapacityError(f"{self.name}: scratch page {page} is held by a checkpoint")
