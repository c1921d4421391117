"""Which tokens of a sequence a grouped cache format keeps in 16 bits, and where.

A query at p reads a group of G tokens as quantised once it ends at p - R or before (law L3), so the last R + G tokens are kept in 16 bits
beside. So are the first W, for good: every row looks at them, and they cost more when they are quantised than all others (attention
sinks, arXiv 2309.17453; without them int4 in groups of 64 loses 2.6 times as much). They have a wide page of their own; token j behind
them is at slot (j - W) % (R + G) of a ring of wide pages of W tokens, W a divisor of R and G: when the first token of a wide page is
committed, nothing that the page held before is read any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.runtime.errors import CapacityError


@dataclass(frozen=True)
class Tail:
    """A sequence's first tokens and its last ones in 16 bits: R = `recent`, G = `group`, W = `page_size`, in tokens.

    Raises CapacityError.
    """

    recent: int
    group: int
    page_size: int

    def __post_init__(self) -> None:
        if min(self.recent, self.group, self.page_size) < 1 or self.recent % self.page_size or self.group % self.page_size:
            raise CapacityError(
                f"kv tail: wide pages of {self.page_size} tokens, expected a divisor of R = {self.recent} and G = {self.group}")

    @property
    def slots(self) -> int:
        """Of the ring."""
        return self.recent + self.group

    @property
    def sinks(self) -> int:
        """First tokens that stay in 16 bits."""
        return self.page_size

    @property
    def num_pages(self) -> int:
        """Wide pages: that of the first tokens, and the ring's."""
        return 1 + self.slots // self.page_size

    def place(self, position: int) -> tuple[int, int]:
        """(place in `PageTable.tail`, slot in that page) of a token in 16 bits."""
        page, slot = divmod(position, self.page_size)
        return (1 + (page - 1) % (self.num_pages - 1) if page else 0), slot

    def kept(self, length: int) -> list[int]:
        """Places of all that queries behind `length` committed tokens may read in 16 bits."""
        return self.places(0, min(length, self.sinks)) + self.places(max(self.sinks, self.first_needed(length)), length)

    def first_needed(self, length: int) -> int:
        """The first of `length` committed tokens, those at the very beginning aside, that a later query may still read in 16 bits."""
        return max(0, (length - self.recent) // self.group * self.group)

    def covers(self, length: int, boundary: int) -> bool:
        """Whether the ring of a sequence of `length` tokens still holds what is needed after `boundary` of them."""
        return boundary <= length and self.first_needed(boundary) >= length - self.slots

    def places(self, start: int, end: int) -> list[int]:
        """Places in `PageTable.tail` of the positions start .. end - 1, each once."""
        pages = range(start // self.page_size, -(-end // self.page_size) if end > start else 0)
        first = [0] if 0 in pages else []
        return first + [self.place(page * self.page_size)[0] for page in pages[len(first) :][-(self.num_pages - 1) :]]
