"""Full pages that are known by what they hold: a page is known by the page before it, its *chain*, and its own tokens, compared in full, so
two prompts that differ anywhere before a page never share it. A known page that nobody owns stays cached until its room is needed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

from mlsdc.runtime.kv_tables import ROOT
from mlsdc.runtime.pages import CopyPage, Pages, no_copy
from mlsdc.runtime.slabs import SlabPool


class KnownPages(Pages):
    """Pages of `page_size` tokens; idle ones are known."""

    def __init__(self, slabs: SlabPool, page_size: int, page_bytes: int, *, copy_page: CopyPage = no_copy) -> None:
        super().__init__(slabs, page_bytes, copy_page=copy_page)
        self.page_size = page_size
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (chain before, tokens) -> (page, chain)
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}  # page -> its entry in `_known`
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages, least recently used first
        self._next_chain = ROOT + 1

    def _longest(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Known pages of the longest prefix of `tokens`, at least one token being left, and the chains before and after them."""
        pages: list[int] = []
        chains = [ROOT]
        size = self.page_size
        while self._known and (start := len(pages) * size) + size < len(tokens):
            known = self._known.get((chains[-1], tuple(tokens[start : start + size])))
            if known is None:
                break
            pages.append(known[0])
            chains.append(known[1])
        return pages, chains

    def _enter(self, key: tuple[int, tuple[int, ...]], page: int) -> tuple[int, int]:
        """The page is known from now on; its entry."""
        known = self._known[key] = (page, self._next_chain)
        self._key[page] = key
        self._next_chain += 1
        return known

    @abstractmethod
    def _forgotten(self, chain: int) -> None:
        """No page ends this chain any more."""

    # --- what an idle page is ---

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def _is_idle(self, page: int) -> bool:
        return page in self._idle

    def _rest(self, page: int) -> bool:
        if page not in self._key:
            return False
        self._idle[page] = None
        return True

    def _wake(self, page: int) -> None:
        self._idle.pop(page, None)

    def _reclaim(self) -> int:
        page = next(iter(self._idle))
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        del self._idle[page]
        _, chain = self._known.pop(self._key.pop(page))
        self._forgotten(chain)

    def _follow(self, page: int, new: int) -> None:
        if page in self._key:
            key = self._key[new] = self._key.pop(page)
            self._known[key] = (new, self._known[key][1])
