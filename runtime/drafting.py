"""Drafting: which nodes each decoding item sends to be verified, and what is learned from the outcome.

The engine's step calls `draft` before its rows are written and `committed` once the target has chosen; between them it knows nothing of
levels. The step owns it: not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlsdc.runtime.levels.base import Level, LevelState
from mlsdc.runtime.levels.compose import compose
from mlsdc.runtime.manifest import Manifest
from mlsdc.runtime.request import Request, StepItem


class Drafting:
    """The drafting levels of one engine, cheapest first; none of them: plain decoding."""

    def __init__(self, manifest: Manifest, levels: Sequence[Level]) -> None:
        """Raises ArtifactError."""
        self.levels = tuple(levels)
        self.level = compose(levels, [info for level in levels for info in manifest.levels if info.name == level.name], manifest.levels[-1].name)
        self.reads_target = self.level is not None and self.level.reads_target
        self._vocab_size = manifest.model.vocab_size
        self._names = (*(level.name for level in manifest.levels), "grammar")  # forced tokens count as a level of their own

    def draft(self, items: Sequence[StepItem]) -> None:
        """Set each decoding item's tree, of at most its budget. A draft that cannot be verified is no draft."""
        level = self.level
        wanted = [item for item in items if item.budget]
        if level is None or not wanted:
            return
        states = [self._state(item.request) for item in wanted]
        trees = level.propose_all(states, [item.budget for item in wanted])
        for item, tree in zip(wanted, trees, strict=True):
            if 0 < len(tree) <= item.budget and min(tree.tokens) >= 0 and max(tree.tokens) < self._vocab_size:
                item.tree = tree

    def _state(self, request: Request) -> LevelState:
        """The level's state of the request, which has seen all of its committed tokens."""
        assert self.level is not None
        if request.drafter is None:
            request.drafter = self.level.start()
        if request.num_observed < len(request.tokens):
            request.drafter.observe(request.tokens[request.num_observed :])
            request.num_observed = len(request.tokens)
        return request.drafter

    def stepped(self, items: Sequence[StepItem], firsts: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Every item's rows of the step that are committed now, the first of them at position `firsts[i]`. Only if `reads_target`."""
        if self.level is not None:
            states = [self._state(item.request) if item.request.budget else None for item in items]
            self.level.stepped(states, firsts, rows)

    def committed(self, item: StepItem, accepted: Sequence[int]) -> None:
        """The target chose: `accepted` are the indices of the nodes of the item's tree that were committed."""
        tree = item.tree
        if not tree:
            item.request.statistics.steps += 1
            return
        names = [self._names[i] for i in tree.levels or (0,) * len(tree)]
        item.request.statistics.count_step(names, tree.depths(), set(accepted))

    def end(self, request: Request) -> None:
        """The request is over: forget what was kept for it."""
        if request.drafter is not None:
            request.drafter.close()
        request.drafter = None
