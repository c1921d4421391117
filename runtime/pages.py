"""Pages of one size: which are free, idle or owned, and the slabs they lie in (slabs.py).

A page is free (nothing in it is wanted), *idle* (nobody owns it, but what it holds may be wanted again), or *owned* by one or more
sequences. What makes an idle page worth keeping is the subclass's business: KvPool knows pages by their tokens, WidePages by checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from mlsdc.runtime.errors import CapacityError

if TYPE_CHECKING:
    from mlsdc.runtime.slabs import SlabPool

CopyPage = Callable[[int, int], None]  # (source, target)


def no_copy(source: int, target: int) -> None:
    """Where nothing lies behind the pages."""


class Pages(ABC):
    """Pages of `page_bytes` on one grid over the slab pool. Not thread-safe: the engine's step owns it.

    `copy_page` copies a page's bytes on the device, after all that was started there: pages are taken while a step runs, too.
    """

    name = "kv pool"

    def __init__(self, slabs: SlabPool, page_bytes: int, *, copy_page: CopyPage = no_copy) -> None:
        cuts = [len(slabs.pages(slab, page_bytes)) for slab in range(slabs.num_slabs)]
        if not cuts or not min(cuts):
            raise CapacityError(
                f"{self.name}: {slabs.num_slabs} slabs of {slabs.slab_bytes} bytes, expected room for a page of {page_bytes}")
        self.page_bytes = page_bytes
        self.num_pages = sum(cuts)  # if it had every slab
        self.slabs: dict[int, range] = {}  # those it holds, and their pages
        self.reserved = 0  # pages that the allocation under way still wants (SlabPool.reserving)
        self.least_cut, self.most_cut = min(cuts), max(cuts)  # pages of a slab
        self.source = slabs
        self._copy = copy_page
        self._free: list[int] = []
        self._owners = [0] * (slabs.pages(slabs.num_slabs - 1, page_bytes)[-1] + 1)  # sequences that hold each page
        slabs.levels.append(self)

    # --- what an idle page is ---

    @property
    @abstractmethod
    def num_idle(self) -> int: ...

    @abstractmethod
    def _is_idle(self, page: int) -> bool: ...

    @abstractmethod
    def _rest(self, page: int) -> bool:
        """The page's last owner is gone: keep it idle and return True, or return False and it is free."""

    @abstractmethod
    def _wake(self, page: int) -> None:
        """A page that may be idle gets an owner."""

    @abstractmethod
    def _reclaim(self) -> int:
        """The idle page that is worth least, forgotten. There is one."""

    @abstractmethod
    def _forget(self, page: int) -> None:
        """The idle page leaves with its slab."""

    @abstractmethod
    def _follow(self, page: int, new: int) -> None:
        """The bytes of an owned page lie in page `new` now: what is known of it follows."""

    @abstractmethod
    def _renamed(self, moved: Mapping[int, int]) -> None:
        """Owned pages got new places: every table follows."""

    # --- counts ---

    @property
    def num_ready(self) -> int:
        """Pages that can be handed out without a slab more."""
        return len(self._free) + self.num_idle

    @property
    def num_available(self) -> int:
        """Pages that can be handed out: free, idle, or in slabs that can be had."""
        return self.num_ready + self.source.num_claimable(self) * self.least_cut

    @property
    def num_spare_slabs(self) -> int:
        """Slabs `surrender` can empty."""
        return max(0, self.num_ready - self.reserved) // self.most_cut

    def free_pages(self) -> list[int]:
        """Pages of its slabs nobody owns and nothing is known of; their bytes mean nothing (tests poison them)."""
        return list(self._free)

    # --- moves ---

    def _take(self) -> int:
        """A page with one owner. Raises CapacityError if there is none."""
        if not self._free:
            slab = None if self.num_idle and self.source.others_reserve(self) else self.source.take_free()
            if slab is None and not self.num_idle:
                slab = self.source.claim(self)
            if slab is not None:
                self.slabs[slab] = self.source.pages(slab, self.page_bytes)
                self._free += reversed(self.slabs[slab])
        page = self._free.pop() if self._free else self._reclaim()
        self._owners[page] = 1
        self.reserved = max(0, self.reserved - 1)
        return page

    def _own(self, page: int) -> None:
        self._wake(page)
        self._owners[page] += 1

    def _release(self, page: int) -> None:
        self._owners[page] -= 1
        if not self._owners[page] and not self._rest(page):
            self._free.append(page)

    def surrender(self) -> int:
        """Empty the slab with the fewest owned pages and give it up; `num_spare_slabs` says whether that can be done.

        What is known of its idle pages is forgotten, its owned ones move to free pages elsewhere, or to idle ones, least wanted first.
        """
        slab = min(self.slabs, key=lambda slab: sum(self._owners[page] > 0 for page in self.slabs[slab]))  # fewest copies
        leaving = self.slabs.pop(slab)
        for page in leaving:
            if self._is_idle(page):
                self._forget(page)
        self._free = [page for page in self._free if page not in leaving]
        moved = {page: self._move(page) for page in leaving if self._owners[page]}
        if moved:
            self._renamed(moved)
        return slab

    def _move(self, page: int) -> int:
        new = self._free.pop() if self._free else self._reclaim()
        self._copy(page, new)
        self._owners[new], self._owners[page] = self._owners[page], 0
        self._follow(page, new)
        return new

    def check_counts(self, owned: Iterable[int]) -> None:
        """`owned`: the pages of all tables, each as often as it is held. Raises CapacityError, naming the first page that is not right."""
        owners = [0] * len(self._owners)
        for page in owned:
            if not 0 <= page < len(owners):
                raise CapacityError(f"{self.name}: a table names page {page}, expected 0 to {len(owners) - 1}")
            owners[page] += 1
        for page, count in enumerate(owners):
            if count != self._owners[page]:
                raise CapacityError(f"{self.name}: page {page} is in {count} tables but counted {self._owners[page]} times")
        self.source.check_integrity()
        held = {page for pages in self.slabs.values() for page in pages}
        taken = {page for page, count in enumerate(owners) if count}
        free, idle = set(self._free), {page for page in held if self._is_idle(page)}
        if len(free) != len(self._free) or free & idle or (free | idle) & taken:
            raise CapacityError(f"{self.name}: a page is in two states at once")
        if free | idle | taken != held or len(idle) != self.num_idle:
            raise CapacityError(
                f"{self.name}: {len(free)} free + {self.num_idle} cached + {len(taken)} owned, expected {len(held)}")
