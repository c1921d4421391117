"""What a sequence owns of a level's pages."""

from __future__ import annotations

from dataclasses import dataclass, field

ROOT = 0  # the chain before the first page


@dataclass(eq=False)
class PageTable:
    """Pages by position, and pages for drafted rows. `num_cached` positions were found in the pool at allocation and need no computing.

    In a grouped format `scratch` and `tail` are wide pages (wide_pages.py); otherwise `scratch` are pages like the others, and there is no
    tail.

    Of a level with a window pages gap_start .. gap_end - 1 were given back; their entries name the last page before them, so that every
    entry is a page of the sequence.
    """

    pages: list[int] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_sealed: int = 0  # leading pages whose tokens are known to the pool's chains
    chain: int = ROOT  # the chain that ends with the last sealed page
    forked: bool = False  # its last pages may be shared, and must be copied before they are written
    num_first: int = 0  # tokens it was allocated for: its prompt, or all there were when it was preempted
    checkpoint: int = 0  # the last page boundary whose tail is kept for it, 0 for none
    rolling: int = ROOT  # the chain of that checkpoint if it gives way to the next one
    gap_start: int = 0
    gap_end: int = 0
    goal: int = 0  # positions that it is to reach step by step

    @property
    def owned(self) -> list[int]:
        """The pages it holds, in order of position."""
        return self.pages if self.gap_start == self.gap_end else self.pages[: self.gap_start] + self.pages[self.gap_end :]

    def clear(self) -> None:
        """It owns nothing any more."""
        vars(self).update(vars(PageTable()))
