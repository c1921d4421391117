"""Trees that grow row by row: the likeliest nodes become rows of a level's program, whose guesses become new nodes, round after round.

A row's keys go to a scratch slot of its sequence, and it reads those of its ancestors (law L3); nothing of it is kept. Where the artifact
has a launch list for it, all rounds run on the device (grown.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log

import numpy as np

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.base import LevelMemory
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.kv_pool import KvPool, PageTable
from mlsdc.runtime.levels.ahead import Ahead, Followed, LooksAhead, S
from mlsdc.runtime.levels.base import Rounds
from mlsdc.runtime.levels.coupling import Draw, coupled
from mlsdc.runtime.levels.grown import PROGRAM, SPREAD, Growing, read_tree, write_record
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.step import Array, Header
from mlsdc.runtime.tree import EMPTY, Tree

NEVER = -1e30  # the log probability of what is not looked at
EXPANDED = 0.08  # a node less likely than this gets no children: the controller would hardly ever send one, and every round is a run


def log_guesses(top: Array, ids: Array | None, limit: int = 1 << 31) -> tuple[Array, Array]:
    """Rows of `top_k` f32[m, 2 k + 1] -> (log probabilities f32[m, k], tokens i32[m, k]), best first.

    `ids` are the target's, where a draft id is another; a token from `limit` on (padding of a vocabulary) has no probability.
    """
    k = top.shape[1] // 2
    with np.errstate(divide="ignore", invalid="ignore"):
        logp = np.nan_to_num(top[:, :k] - np.log(top[:, 2 * k :]), nan=-np.inf)
    tokens = np.nan_to_num(top[:, k : 2 * k]).astype(np.int64)
    if ids is not None:
        return logp, ids[np.clip(tokens, 0, len(ids) - 1)]
    if tokens.size and int(tokens.max()) >= limit:
        logp = np.where(tokens < limit, logp, -np.inf)
        order = np.argsort(-logp, axis=-1, kind="stable")
        logp, tokens = np.take_along_axis(logp, order, -1), np.take_along_axis(tokens, order, -1)
    return logp, tokens


def draft_ids(info: LevelInfo, artifact: Artifact) -> Array | None:
    """The target's id of each draft id, i32[draft_vocab]; None where they are the same. Raises ArtifactError."""
    file = info.params.get("d2t")
    if not file:
        return None
    ids = np.fromfile(artifact.path(str(file)), "<i4")
    padded = artifact.manifest.model.vocab_size
    if not ids.size or int(ids.min()) < 0:
        raise ArtifactError(f"level '{info.name}': {file} is no draft vocabulary of {padded} tokens; compile again")
    return ids


@dataclass
class Growth:
    """One request's tree. Nodes are in order of guessing. `committed` positions lie in the pages of `table`; `root` is the ancestor word of
    the tree's first nodes: slot 0 where the last token itself is a row in scratch, else nothing."""

    table: PageTable
    committed: int
    budget: int
    root: int = 0
    draw: Draw | None = None  # how its request draws, if it does
    shift: int = 0  # a guess of the row at position p is of the token at p + shift of the sequence
    slots: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    logq: list[float] = field(default_factory=list)
    paths: list[float] = field(default_factory=list)
    above: list[int] = field(default_factory=list)  # a node's ancestor slots, without its own
    features: list[Array | None] = field(default_factory=list)  # what a node's row starts from
    expanded: set[int] = field(default_factory=set)

    def add(self, parent: int, logp: Array, tokens: Array, feature: Array | None, word: int, floor: float) -> None:
        """The guesses of the row of node `parent` (-1: of the last token), whose ancestor word with its own slot is `word`."""
        self.expanded.add(parent)
        start = self.paths[parent] if parent >= 0 else 0.0
        for value, token in zip(logp.tolist(), tokens.tolist(), strict=True):
            if not start + value > floor:
                break
            self.tokens.append(token)
            self.parents.append(parent)
            self.logq.append(value)
            self.paths.append(start + value)
            self.above.append(word)
            self.features.append(feature)

    def child(self, parent: int, token: int) -> int | None:
        """The node of that token below `parent`."""
        return next((i for i, (p, t) in enumerate(zip(self.parents, self.tokens, strict=True)) if p == parent and t == token), None)

    def best(self, count: int) -> list[int]:
        """The likeliest `count` nodes, in order of guessing: parents come first, for no child is likelier than its parent."""
        return sorted(sorted(range(len(self.tokens)), key=lambda i: (-self.paths[i], i))[: max(0, count)])

    def wanted(self, most: int, least: float) -> list[int]:
        """Nodes that are to become rows: the likeliest ones that are not yet, if they or a child may be in the tree, and whose paths have a
        log probability of `least`."""
        waiting = [node for node in self.best(self.budget - 1) if node not in self.expanded and self.paths[node] >= least]
        return sorted(sorted(waiting, key=lambda i: (-self.paths[i], i))[: max(0, most)])

    def tree(self, level: int) -> Tree:
        nodes = self.best(self.budget)
        if not nodes:
            return EMPTY
        place = {node: i for i, node in enumerate(nodes)} | {-1: -1}
        return Tree(tuple(self.tokens[n] for n in nodes), tuple(place[self.parents[n]] for n in nodes),
                    tuple(self.logq[n] for n in nodes), (level,) * len(nodes))


@dataclass(frozen=True)
class Row:
    """A row in scratch: its token, its ancestor slots without its own, and what it starts from."""

    token: int
    above: int
    feature: Array | None


class GrowingLevel(LooksAhead):
    """What levels that grow trees share. `program` makes `top` and, for levels with features, `hidden`."""

    index: int
    depth: int
    floor: float
    ids: Array | None = None  # the target's token of each of the level's, where they differ
    own_ids: Array | None = None  # and the other way
    vocab_size: int = 1 << 31
    max_nodes: int
    least = log(EXPANDED)
    has_features = False

    def bind(self, memory: LevelMemory, target: LevelMemory, pool: KvPool | None) -> None:
        self.buffers = memory.buffers
        self.program = memory.programs["draft"]
        limits, tail = memory.buffers.limits, memory.buffers.tail
        size = memory.buffers.page_size if tail is None else tail.page_size
        self.most_rows = min(limits.max_num_batched_tokens, limits.max_logit_rows)
        self.most_slots = min(64, limits.scratch_pages(size) * size)
        self.trees = memory.programs.get(PROGRAM)
        if self.ids is not None and memory.buffers.draft_ids.size:
            memory.buffers.draft_ids[:] = self.ids
            memory.bring("draft_ids")

    def spoken(self, tokens: Sequence[int]) -> Sequence[int] | Array:
        """The target's tokens in the level's own numbers."""
        return tokens if self.own_ids is None else self.own_ids[list(tokens)]

    @property
    def log_floor(self) -> float:
        return float(np.log(self.floor)) if self.floor > 0 else NEVER

    def grows_there(self, requests: int, rows: int) -> bool:
        """Whether the device grows these requests' trees, whose first round has so many rows. Not while somebody watches the draws."""
        return self.trees is not None and max(requests, rows) <= self.most_rows and self.draws.watch is None

    def grown(self, growths: Sequence[Growth], turns: Sequence[int], lasts: Sequence[int], rows: int) -> Rounds[list[Tree]]:
        """All rounds on the device, from a first one whose `rows` rows are written: the last one of each request guesses its tree's first
        nodes, which are of the token at its turn. `lasts` are the last tokens, as the level knows them."""
        assert self.trees is not None
        stride = min(SPREAD, self.most_rows // len(growths))
        for seq, (growth, turn, last) in enumerate(zip(growths, turns, lasts, strict=True)):
            values = self.record(growth.budget, growth.committed, stride, turn, growth.shift) | {
                Growing.SLOTS: growth.slots, Growing.ROOT: growth.root, Growing.LAST: last}
            write_record(self.buffers.growth[seq], values, growth.draw)
        self._say(rows, len(growths), len(growths), later=stride * len(growths))
        self.trees.start()
        yield
        self.trees.finish()
        return [read_tree(self.buffers.grown[seq], self.index) for seq in range(len(growths))]

    def record(self, budget: int, committed: int, stride: int, turn: int, shift: int) -> dict[Growing, float]:
        """What the device is told of a tree whose first guesses are made by a row in a page."""
        return {Growing.BUDGET: budget, Growing.COMMITTED: committed, Growing.STRIDE: stride, Growing.SLOTS: 0,
                Growing.MOST_SLOTS: self.most_slots, Growing.ROOT: 0, Growing.SHIFT: shift, Growing.TURN: turn,
                Growing.FLOOR: self.log_floor, Growing.LEAST: self.least, Growing.LAST: 0}

    def grow_behind(self, behind: Ahead[S], work: Sequence[Followed[S]], begins: Callable[[S], tuple[PageTable, int, int]]) -> None:
        """Start the list of trees that grow behind the target's step. `begins`: a state's pages, how many positions lie there, and the
        shift of its guesses (as in Growth)."""
        if not work:
            return
        stride = min(SPREAD, self.most_rows // len(work))
        values = []
        for at, one in enumerate(work):
            table, committed, shift = begins(one.state)
            self.sequence(at, table, one.first, one.room, committed)
            values.append(self.record(self.max_nodes, committed, stride, len(one.state.tokens), shift))
        behind.start(work, values, later=stride * len(work))

    def collect(self) -> None:
        for found in self.behind.found() if self.behind is not None else ():
            found.state.made = found.end, found.last, read_tree(self.buffers.grown[found.at], self.index)

    def grow(self, growths: Sequence[Growth], rounds: int) -> Rounds[None]:
        """Up to `rounds` runs of the program, each for the likeliest waiting nodes of all requests."""
        share = max(1, self.most_rows // max(1, len(growths)))
        for _ in range(rounds):
            chosen = [growth.wanted(min(SPREAD, share, self.most_slots - growth.slots), self.least) for growth in growths]
            work = [(growth, nodes) for growth, nodes in zip(growths, chosen, strict=True) if nodes]
            if not work:
                return
            found = yield from self.rows([
                (growth, [Row(growth.tokens[n], growth.above[n], growth.features[n]) for n in nodes]) for growth, nodes in work])
            for (growth, nodes), results in zip(work, found, strict=True):
                for node, (logp, tokens, feature, word) in zip(nodes, results, strict=True):
                    growth.add(node, logp, tokens, feature, word, self.log_floor)

    def judge(self, growths: Sequence[Growth], trees: Sequence[Tree], lasts: Sequence[int] | None = None) -> Rounds[None]:
        """Rows for all nodes of the trees that the level below proposed, in one run; what this level would say too are nodes now, with its
        own probabilities and children. What it would not say is dropped, with all that hangs on it.

        `lasts`: each request's last token, where it has no row yet: it becomes the first one of its scratch slots.
        """
        work: list[tuple[Growth, list[Row], Tree, int]] = []
        for i, (growth, tree) in enumerate(zip(growths, trees, strict=True)):
            rows = [] if lasts is None else [Row(lasts[i], 0, None)]
            extra = len(rows)
            room = min(len(tree), self.most_slots - growth.slots - extra, max(1, self.most_rows // len(growths)) - extra)
            words: list[int] = []
            for node in range(room):
                above = growth.root if tree.parents[node] < 0 else words[tree.parents[node]]
                rows.append(Row(tree.tokens[node], above, None))
                words.append(above | 1 << (growth.slots + extra + node))
            if rows:
                work.append((growth, rows, tree, extra))
        found = (yield from self.rows([(growth, rows) for growth, rows, _, _ in work])) if work else []
        for (growth, _, tree, extra), results in zip(work, found, strict=True):
            if extra:
                logp, tokens, feature, word = results[0]
                growth.add(-1, logp, tokens, feature, word, self.log_floor)
            place: dict[int, int | None] = {-1: -1}
            for node, (logp, tokens, feature, word) in enumerate(results[extra:]):
                parent = place[tree.parents[node]]
                mine = None if parent is None else growth.child(parent, tree.tokens[node])
                place[node] = mine
                if mine is not None and mine not in growth.expanded:
                    growth.add(mine, logp, tokens, feature, word, self.log_floor)

    def rows(self, work: Sequence[tuple[Growth, Sequence[Row]]]) -> Rounds[list[list[tuple[Array, Array, Array | None, int]]]]:
        """Run rows of several requests: of each row its guesses, its hidden state and its ancestor word."""
        words, turns = self.write(work)
        owners = [growth.draw for growth, rows in work for _ in rows]
        at = len(turns)
        self.begin_run(at, len(work), at)
        yield
        self.program.finish()
        logp, tokens = coupled(*log_guesses(self.program.tap("top")[:at], self.ids, self.vocab_size), owners, turns, self.draws)
        hidden = self.program.tap("hidden")[:at].copy() if self.has_features else None
        results, at = [], 0
        for of_growth in words:
            results.append([(logp[at + i], tokens[at + i], None if hidden is None else hidden[at + i], word)
                            for i, word in enumerate(of_growth)])
            at += len(of_growth)
        return results

    def write(self, work: Sequence[tuple[Growth, Sequence[Row]]]) -> tuple[list[list[int]], list[int]]:
        """Rows into the step inputs: their ancestor words by request, and the turn that each one's guesses are of."""
        at = 0
        words: list[list[int]] = []
        turns: list[int] = []
        for seq, (growth, rows) in enumerate(work):
            of_growth = []
            for i, row in enumerate(rows):
                word = row.above | 1 << growth.slots
                self.buffers.tokens[at + i] = row.token if self.own_ids is None else self.own_ids[row.token]
                position = growth.committed + row.above.bit_count()
                turns.append(position + growth.shift)
                self.buffers.positions[at + i] = position
                self.buffers.row_slot[at + i] = growth.slots
                self.buffers.ancestors[at + i] = word
                if row.feature is not None:
                    self.buffers.features[at + i] = row.feature
                growth.slots += 1
                of_growth.append(word)
            self.sequence(seq, growth.table, at, len(rows), growth.committed)
            words.append(of_growth)
            at += len(rows)
        self.buffers.out_rows[:at] = range(at)
        return words, turns

    def sequence(self, seq: int, table: PageTable, first: int, count: int, committed: int) -> None:
        """The step's inputs of one sequence: rows first .. first + count - 1, `committed` positions in pages."""
        buffers = self.buffers
        buffers.row_seq[first : first + count] = seq
        buffers.seq_ctx[seq] = committed
        buffers.seq_row[seq] = first
        buffers.seq_rows[seq] = count
        buffers.page_table[seq, : len(table.pages)] = table.pages
        buffers.scratch_table[seq, : len(table.scratch)] = table.scratch
        if buffers.tail is not None:
            buffers.tail_table[seq, : len(table.tail)] = table.tail

    def begin_run(self, rows: int, seqs: int, out: int) -> None:
        """Start the program; whoever reads its results finishes it."""
        self._say(rows, seqs, out)
        self.program.start()

    def _say(self, rows: int, seqs: int, out: int, later: int = 0) -> None:
        header = self.buffers.header
        header[Header.ROWS], header[Header.SEQS], header[Header.OUT], header[Header.LATER] = rows, seqs, out, later
        header[Header.COMMITS] = header[Header.GROUPS] = 0
