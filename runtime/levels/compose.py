"""Several drafting levels as one. Merged levels' nodes go into one tree, the likeliest paths of all of them first; a stacked level verifies
the tree of those below it and extends it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.kv_pool import PageTable
from mlsdc.runtime.levels.base import Level, LevelState, Rounds, Verifier, finished, together
from mlsdc.runtime.levels.coupling import Draw
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.tree import EMPTY, MAX_NODES, Tree


def compose(levels: Sequence[Level], infos: Sequence[LevelInfo], target: str, dropped: Collection[str] = ()) -> Level | None:
    """What drafts for the target: nothing, a level, or levels merged or stacked. `infos` are the levels', in the same order; those named
    `dropped` are left out, and what they verified goes to those who verify them. Raises ArtifactError."""
    if not any(level.name not in dropped for level in levels):
        return None
    if len(levels) == 1:
        return levels[0]
    names = ", ".join(level.name for level in levels)
    if len(infos) != len(levels):
        raise ArtifactError(f"levels {names}: the artifact does not know all of them; compile again")
    after = [*(info.name for info in infos[1:]), target]
    verifier = {info.name: str(info.params.get("verified_by", name)) for info, name in zip(infos, after, strict=True)}
    for name in dropped:
        above = verifier.pop(name, None)
        verifier = {lower: above if upper == name and above else upper for lower, upper in verifier.items()}
    stages: list[Level] = []
    wanted = target
    while True:  # from the target down
        found = [i for i, info in enumerate(infos) if verifier.get(info.name) == wanted]
        if not found:
            break
        if len(found) > 1 and any("merge_nodes" not in infos[i].params for i in found):
            raise ArtifactError(f"levels {names}: more than one of them is verified by '{wanted}', and they are not merged; compile again")
        if len(found) == 1:
            stages.append(levels[found[0]])
        else:
            stages.append(MergedLevel([levels[i] for i in found], max(int(infos[i].params["merge_nodes"]) for i in found)))
        if len(stages) > len(levels):
            raise ArtifactError(f"levels {names}: they verify each other in a circle; compile again")
        wanted = infos[found[0]].name
    stages.reverse()
    return stack(stages)


def stack(levels: Sequence[Level]) -> Level:
    """Levels of which each verifies the one before it. Raises ArtifactError for one that cannot."""
    lowest, *above = levels
    verifiers = [level for level in above if isinstance(level, Verifier)]
    for level in above:
        if level not in verifiers:
            raise ArtifactError(f"level '{level.name}': a '{level.kind}' level cannot verify the level below it; compile again")
    return StackedLevel(lowest, verifiers) if verifiers else lowest


class ComposedState(LevelState):
    """The states of all levels of a merge or a stack for one request."""

    def __init__(self, level: ComposedLevel, states: Sequence[LevelState]) -> None:
        self.level, self.states = level, states
        self.silent: set[int] = set()  # levels that its request does not let draft

    @property
    def prepared(self) -> bool:
        """One of them is: the others propose in the next step."""
        return any(state.prepared for i, state in enumerate(self.states) if i not in self.silent)

    def observe(self, tokens: Sequence[int]) -> None:
        for state in self.states:
            state.observe(tokens)

    def propose(self, budget: int) -> Tree:
        return self.level.propose_all([self], [budget])[0]

    def rollback(self, num_tokens: int) -> None:
        for state in self.states:
            state.rollback(num_tokens)

    def place(self, table: PageTable, computed: int) -> None:
        for state in self.states:
            state.place(table, computed)

    def couple(self, draw: Draw) -> None:
        for state in self.states:
            state.couple(draw)

    def only(self, names: Collection[str]) -> None:
        for i, (level, state) in enumerate(zip(self.level.levels, self.states, strict=True)):
            if isinstance(level, ComposedLevel):
                state.only(names)
            elif level.name not in names:
                self.silent.add(i)

    def release(self) -> bool:
        return sum(state.release() for state in self.states) > 0  # all of them


class ComposedLevel(Level):
    """Made of others; a request's state is one of each."""

    levels: tuple[Level, ...]

    def start(self) -> LevelState:
        return ComposedState(self, [level.start() for level in self.levels])

    def stepped(self, states: Sequence[LevelState | None], firsts: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        for i, level in enumerate(self.levels):
            level.stepped([None if state is None else _part(state, i) for state in states], firsts, rows)

    @property
    def looks_ahead(self) -> bool:
        return any(level.looks_ahead for level in self.forerunners)

    @property
    def forerunners(self) -> Sequence[Level]:
        """Those that may look ahead."""
        return self.levels

    def ahead(self, states: Sequence[LevelState | None]) -> None:
        for i, level in enumerate(self.forerunners):
            if level.looks_ahead:
                level.ahead([None if state is None or i in _composed(state).silent else _part(state, i) for state in states])

    def ask(
        self, index: int, states: Sequence[LevelState], budgets: Sequence[int], below: Sequence[Tree] | None = None) -> Rounds[list[Tree]]:
        """What level `index` makes of the trees `below` (None: it is the lowest); a request that does not let it draft keeps its own."""
        trees = [EMPTY] * len(states) if below is None else list(below)
        asked = [j for j, state in enumerate(states) if index not in _composed(state).silent]
        if not asked:
            return trees
        level, parts, rooms = self.levels[index], [_part(states[j], index) for j in asked], [budgets[j] for j in asked]
        if below is None:
            found = yield from level.propose_rounds(parts, rooms)
        else:
            assert isinstance(level, Verifier)
            found = level.propose_above(parts, rooms, [trees[j] for j in asked])
        for j, tree in zip(asked, found, strict=True):
            trees[j] = tree
        return trees


class StackedLevel(ComposedLevel):
    """The lowest level proposes a tree; each level above judges it and hands up its own."""

    kind = "stack"

    def __init__(self, lowest: Level, above: Sequence[Verifier]) -> None:
        self.levels = (lowest, *above)
        self.name = ">".join(level.name for level in self.levels)
        self.reads_target = any(level.reads_target for level in self.levels)

    @property
    def forerunners(self) -> Sequence[Level]:
        """The lowest: those above judge what it proposed, and what they drafted without it would never be used."""
        return self.levels[:1]

    def propose_all(self, states: Sequence[LevelState], budgets: Sequence[int]) -> list[Tree]:
        trees: list[Tree] | None = None
        for i in range(len(self.levels)):
            trees = finished(self.ask(i, states, budgets, trees))
        return trees or []


class MergedLevel(ComposedLevel):
    """Each level proposes its own tree; the merged one keeps the likeliest `max_nodes` paths of all of them. What their programs start is
    waited for together."""

    kind = "merge"

    def __init__(self, levels: Sequence[Level], max_nodes: int) -> None:
        self.levels = tuple(levels)
        self.max_nodes = max_nodes
        self.name = "+".join(level.name for level in levels)
        self.reads_target = any(level.reads_target for level in levels)

    def propose_all(self, states: Sequence[LevelState], budgets: Sequence[int]) -> list[Tree]:
        budgets = [min(budget, self.max_nodes) for budget in budgets]
        found = together([self.ask(i, states, budgets) for i in range(len(self.levels))])
        return [merge_trees([of_level[j] for of_level in found], budget) for j, budget in enumerate(budgets)]


def _composed(state: LevelState) -> ComposedState:
    assert isinstance(state, ComposedState)
    return state


def _part(state: LevelState, index: int) -> LevelState:
    return _composed(state).states[index]


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
