"""One device's KV bytes, cut into slabs of one size that levels lend each other.

A slab serves one level at a time and is cut into that level's pages. Pages lie on one grid per level, multiples of its `page_bytes`
from the pool's start, so that a kernel finds page i at `pool + i * page_bytes` whatever slab it is in; a slab holds the pages of the grid
that lie in it whole (`slab_bytes_for` picks a size that wastes little or nothing). A level without a free page takes a free slab, or
asks the others for one: they drop idle pages, and move owned ones together, until a slab is empty. So a level that is asked
keeps at most one slab more than its owned pages fill. A level of a grouped format has two kinds of pages (wide_pages.py), and to the slabs
they are two levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import lcm
from typing import TYPE_CHECKING

from mlsdc.runtime.errors import CapacityError

if TYPE_CHECKING:
    from mlsdc.runtime.pages import Pages

PAGES_PER_SLAB = 32  # of the largest page, where the levels' pages have no small common multiple


def slab_bytes_for(page_bytes: Sequence[int], pool_bytes: int) -> int:
    """Bytes of a slab for levels with these pages. One level alone has nobody to share with: its slab is the whole pool.

    A small common multiple is cut without waste; otherwise less than two pages of each slab are (32 of the largest fit). A pool too small
    for eight such slabs is cut into eight, or as many as hold a page of each.
    """
    if not page_bytes:
        return 0
    if len(page_bytes) == 1:
        return pool_bytes // page_bytes[0] * page_bytes[0]
    common, most = lcm(*page_bytes), PAGES_PER_SLAB * max(page_bytes)
    most = max(2 * max(page_bytes), min(most, pool_bytes // 8))
    return most // common * common if common <= most else most


class SlabPool:
    """`num_slabs` slabs of `slab_bytes`. Not thread-safe: the engine's step owns it."""

    def __init__(self, num_slabs: int, slab_bytes: int) -> None:
        self.num_slabs = num_slabs
        self.slab_bytes = slab_bytes
        self.levels: list[Pages] = []
        self._free = list(range(num_slabs - 1, -1, -1))

    def pages(self, slab: int, page_bytes: int) -> range:
        """The pages of a level's grid that lie in the slab whole."""
        start = slab * self.slab_bytes
        return range(-(-start // page_bytes), (start + self.slab_bytes) // page_bytes)

    def num_claimable(self, level: Pages) -> int:
        """Slabs the level could get: free ones and those the other levels could give up."""
        return len(self._free) + sum(other.num_spare_slabs for other in self.levels if other is not level)

    def can_take(self, needs: Mapping[Pages, int]) -> bool:
        """Whether the levels can take so many pages, all together."""
        slabs = len(self._free)
        for level in self.levels:
            left = level.num_ready - needs.get(level, 0)
            slabs += left // (level.most_cut if left >= 0 else level.least_cut)
        return slabs >= 0

    def can_spare(self, level: Pages) -> bool:
        """Whether the level can take a page beside all that is reserved."""
        return self.can_take({other: other.reserved + (other is level) for other in self.levels})

    @contextmanager
    def reserving(self, needs: Mapping[Pages, int]) -> Iterator[None]:
        """While pages are taken one by one: no level gives a slab away whose pages are among these `needs`, which `can_take` allowed."""
        for level, count in needs.items():
            level.reserved = count
        try:
            yield
        finally:
            for level in needs:
                level.reserved = 0

    def others_reserve(self, level: Pages) -> bool:
        return any(other.reserved for other in self.levels if other is not level)

    def take_free(self) -> int | None:
        return self._free.pop() if self._free else None

    def claim(self, level: Pages) -> int:
        """A free slab, or one of the level that can spare most. Raises CapacityError if there is none."""
        if self._free:
            return self._free.pop()
        giver = max((other for other in self.levels if other is not level), key=lambda other: other.num_spare_slabs, default=None)
        if giver is None or not giver.num_spare_slabs:
            raise CapacityError(f"kv pool: no slab to spare among {self.num_slabs}")
        return giver.surrender()

    def check_integrity(self) -> None:
        """Every slab is free or held by exactly one level. Raises CapacityError, naming the first that is not."""
        holders = [0] * self.num_slabs
        for slab in [*self._free, *(slab for level in self.levels for slab in level.slabs)]:
            holders[slab] += 1
        for slab, count in enumerate(holders):
            if count != 1:
                raise CapacityError(f"kv pool: slab {slab} is held {count} times")
