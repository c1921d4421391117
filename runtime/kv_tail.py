"""Which tokens of a sequence a grouped cache format keeps in 16 bits, and where.

A query at p reads a group of G tokens as quantised once it ends at p - R or before (law L3), so the last R + G tokens are kept in 16 bits
beside: token j at slot j % (R + G) of a ring. The ring lies in wide pages of W tokens, W a divisor of R and G: when the first token
of a wide page is committed, nothing that the page held before is read any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.runtime.errors import CapacityError


@dataclass(frozen=True)
class Tail:
    """The ring of a sequence's last tokens in 16 bits: R = `recent`, G = `group`, W = `page_size`, in tokens. Raises CapacityError."""

    recent: int
    group: int
    page_size: int

    def __post_init__(self) -> None:
        if min(self.recent, self.group, self.page_size) < 1 or self.recent % self.page_size or self.group % self.page_size:
            raise CapacityError(
                f"kv tail: wide pages of {self.page_size} tokens, expected a divisor of R = {self.recent} and G = {self.group}")

    @property
    def slots(self) -> int:
        return self.recent + self.group

    @property
    def num_pages(self) -> int:
        return self.slots // self.page_size

    def first_needed(self, length: int) -> int:
        """The first of `length` committed tokens that a later query may still read in 16 bits."""
        return max(0, (length - self.recent) // self.group * self.group)

    def covers(self, length: int, boundary: int) -> bool:
        """Whether the ring of a sequence of `length` tokens still holds what is needed after `boundary` of them."""
        return boundary <= length and self.first_needed(boundary) >= length - self.slots

    def places(self, start: int, end: int) -> list[int]:
        """Places in `PageTable.tail` of the positions start .. end - 1."""
        count = min(-(-end // self.page_size) - start // self.page_size, self.num_pages) if end > start else 0
        return [(start // self.page_size + i) % self.num_pages for i in range(count)]
