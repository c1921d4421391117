"""Drafting: which nodes each decoding item sends to be verified, and what is learned from the outcome.

The engine's step calls `draft` before its rows are written and `committed` once the target has chosen; between them it knows nothing of
levels. The step owns it: not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.manifest import Manifest
from mlsdc.runtime.request import Request, StepItem


class Drafting:
    """The drafting levels of one engine, cheapest first; none of them: plain decoding."""

    def __init__(self, manifest: Manifest, levels: Sequence[Level]) -> None:
        """Raises ArtifactError."""
        if len(levels) > 1:
            names = ", ".join(level.name for level in levels)
            raise ArtifactError(f"levels {names}: this runtime drafts with one level: compile with a cascade of one")
        self.levels = tuple(levels)
        self._vocab_size = manifest.model.vocab_size
        self._names = tuple(level.name for level in manifest.levels)

    def draft(self, items: Sequence[StepItem]) -> None:
        """Set each decoding item's tree, of at most its budget. A draft that cannot be verified is no draft."""
        if not self.levels:
            return
        level = self.levels[0]
        for item in items:
            if not item.budget:
                continue
            request = item.request
            if request.drafter is None:
                request.drafter = level.start()
            request.drafter.observe(request.tokens[request.num_observed :])
            request.num_observed = len(request.tokens)
            tree = request.drafter.propose(item.budget)
            if 0 < len(tree) <= item.budget and min(tree.tokens) >= 0 and max(tree.tokens) < self._vocab_size:
                item.tree = tree

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
        request.drafter = None
