"""Several drafting levels as one: merged levels' nodes go into one tree, the likeliest paths of all of them first."""

from __future__ import annotations

from collections.abc import Sequence

from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.levels.base import Level, LevelState
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.tree import EMPTY, MAX_NODES, Tree


def compose(levels: Sequence[Level], infos: Sequence[LevelInfo], target: str) -> Level | None:
    """What drafts for the target: nothing, a level, or levels merged. `infos` are the levels', in the same order. Raises ArtifactError."""
    if not levels:
        return None
    if len(levels) == 1:
        return levels[0]
    loose = [info.name for info in infos if info.params.get("verified_by", target) != target]
    if loose or len(infos) != len(levels) or any("merge_nodes" not in info.params for info in infos):
        raise ArtifactError(f"levels {', '.join(level.name for level in levels)}: this runtime cannot stack them; compile again")
    return MergedLevel(levels, max(int(info.params["merge_nodes"]) for info in infos))


class MergedState(LevelState):
    """The states of all merged levels for one request."""

    def __init__(self, level: MergedLevel, states: Sequence[LevelState]) -> None:
        self.level, self.states = level, states

    def observe(self, tokens: Sequence[int]) -> None:
        for state in self.states:
            state.observe(tokens)

    def propose(self, budget: int) -> Tree:
        return self.level.propose_all([self], [budget])[0]

    def rollback(self, num_tokens: int) -> None:
        for state in self.states:
            state.rollback(num_tokens)

    def couple(self, seed: int) -> None:
        for state in self.states:
            state.couple(seed)

    def close(self) -> None:
        for state in self.states:
            state.close()


class MergedLevel(Level):
    """Each level proposes its own tree; the merged one keeps the likeliest `max_nodes` paths of all of them."""

    kind = "merge"

    def __init__(self, levels: Sequence[Level], max_nodes: int) -> None:
        self.levels = tuple(levels)
        self.max_nodes = max_nodes
        self.name = "+".join(level.name for level in levels)
        self.reads_target = any(level.reads_target for level in levels)

    def start(self) -> LevelState:
        return MergedState(self, [level.start() for level in self.levels])

    def propose_all(self, states: Sequence[LevelState], budgets: Sequence[int]) -> list[Tree]:
        budgets = [min(budget, self.max_nodes) for budget in budgets]
        found = [level.propose_all([_part(state, i) for state in states], budgets) for i, level in enumerate(self.levels)]
        return [merge_trees([of_level[j] for of_level in found], budget) for j, budget in enumerate(budgets)]

    def stepped(self, states: Sequence[LevelState | None], firsts: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        for i, level in enumerate(self.levels):
            level.stepped([None if state is None else _part(state, i) for state in states], firsts, rows)


def _part(state: LevelState, index: int) -> LevelState:
    assert isinstance(state, MergedState)
    return state.states[index]


def merge_trees(trees: Sequence[Tree], budget: int) -> Tree:
    """One tree of the likeliest `budget` paths. A path that several trees have counts once, with the larger probability, and belongs to the
    first level that gave it that. Trees without log probabilities count as certain."""
    budget = min(budget, MAX_NODES)
    filled = [tree for tree in trees if tree]
    if not filled or budget <= 0:
        return EMPTY
    if len(filled) == 1 and len(filled[0]) <= budget:
        return filled[0]
    best: dict[tuple[int, ...], tuple[float, int]] = {}  # path of tokens -> (log probability, level)
    for tree in filled:
        paths: list[tuple[int, ...]] = []
        sums: list[float] = []
        for i, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            above, total = (paths[parent], sums[parent]) if parent >= 0 else ((), 0.0)
            path = (*above, token)
            total += min(0.0, tree.logq[i]) if tree.logq else 0.0
            paths.append(path)
            sums.append(total)
            if path not in best or total > best[path][0]:
                best[path] = total, tree.levels[i] if tree.levels else 0
    for path in sorted(best, key=len, reverse=True):  # a path is as likely as its likeliest end, whoever proposed it
        above = path[:-1]
        if above and best[above][0] < best[path][0]:
            best[above] = best[path][0], best[above][1]
    kept = sorted(best, key=lambda path: (-best[path][0], len(path), path))[:budget]
    kept.sort(key=lambda path: (len(path), -best[path][0], path))
    place = {(): -1} | {path: i for i, path in enumerate(kept)}
    logq = tuple(best[path][0] - (best[path[:-1]][0] if len(path) > 1 else 0.0) for path in kept)
    return Tree(tuple(path[-1] for path in kept), tuple(place[path[:-1]] for path in kept), logq, tuple(best[path][1] for path in kept))
