"""How many prompt rows a step may take beside sequences that decode, so that these do not feel a long prompt.

Steps without prompt rows say what a step costs by itself, steps with them what a row adds (more and more of it, as a prompt's context
grows). Drafted nodes make a step longer: one with nodes says only that a plain one is no longer than it. The next chunk is what fits into
`stretch` plain steps. Only times and counts: texts do not depend on it (law L2).
"""

from __future__ import annotations

TILE = 8  # rows that share one reading of the weights: a chunk is no less, where that takes no more than TILE_STRETCH plain steps
TILE_STRETCH = 2.4  # else prompts would crawl at a small stretch; and far into a prompt, rows cost so much that less than a tile must do
FRESH = 0.3  # weight of the newest step in the averages


class ChunkPacer:
    """`stretch`: how many plain steps a step with prompt rows may take; None does not limit it. Times are seconds on any clock."""

    def __init__(self, stretch: float | None = None) -> None:
        self.stretch = stretch
        self._began: float | None = None
        self._prompt_rows = 0
        self._plain_s: float | None = None  # a step of decoding rows alone
        self._row_s: float | None = None  # what one prompt row adds to it

    def limit(self, most: int) -> int:
        """Prompt rows of the next step, at most `most`."""
        if self.stretch is None or most <= 1:
            return most
        if self._plain_s is None or self._row_s is None:
            return min(most, 4 * TILE)  # nothing known yet: small enough to hurt nobody
        if self._row_s <= 0:
            return most
        fits = int((self.stretch - 1) * self._plain_s / self._row_s)
        if fits >= TILE:
            return min(most, fits // TILE * TILE)
        fits = int((max(self.stretch, TILE_STRETCH) - 1) * self._plain_s / self._row_s)
        return max(1, min(most, TILE, fits))

    def step(self, now: float, prompt_rows: int, *, decoding: bool, drafted: bool = False) -> None:
        """A step of so many prompt rows begins; the one before it, of which `drafted` says whether it had nodes, has ended.

        Steps that nobody decodes in teach nothing.
        """
        if self._began is not None:
            self._learn(now - self._began, drafted)
        self._began = now if decoding else None
        self._prompt_rows = prompt_rows

    def rest(self) -> None:
        """Nobody runs any more: the time until the next step begins is no step's."""
        self._began = None

    def _learn(self, seconds: float, drafted: bool) -> None:
        if self._prompt_rows == 0:
            longest = self._plain_s if drafted and self._plain_s is not None else seconds
            self._plain_s = _blend(self._plain_s, min(seconds, longest))
        elif drafted:
            return
        elif self._plain_s is not None:
            self._row_s = _blend(self._row_s, max(0.0, seconds - self._plain_s) / self._prompt_rows)


def _blend(old: float | None, new: float) -> float:
    """A moving average that one hiccup of the machine cannot move far. Of 0 (a row that was free) there is no twice as much."""
    if not old:
        return new
    return old + FRESH * (min(new, 2 * old) - old)
