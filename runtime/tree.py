"""Trees of drafted tokens: the nodes one verify step checks together.

`parents[i]` is the node before node i, or -1 for the last committed token; parents come before their children, so node i
always has `parents[i] < i`. A chain is a tree of width 1, a plain decode step is a tree of no nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

MAX_NODES = 63  # the root row takes one of the 64 bits of an ancestor word


@dataclass(frozen=True)
class Tree:
    """Drafted nodes, parents first. `logq[i]` is the proposer's log probability of node i given its parent.

    `levels[i]` is the index (in the artifact's level table) of the level that proposed node i; statistics are kept by it.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    logq: tuple[float, ...] = ()
    levels: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"tree: {len(self.tokens)} tokens but {len(self.parents)} parents")
        if len(self.tokens) > MAX_NODES:
            raise ValueError(f"tree: {len(self.tokens)} nodes, at most {MAX_NODES}")
        for i, parent in enumerate(self.parents):
            if not -1 <= parent < i:
                raise ValueError(f"tree: parents[{i}] is {parent}, expected -1..{i - 1}")

    @staticmethod
    def made(tokens: Sequence[int], parents: Sequence[int], level: int, depths: list[int], words: list[int]) -> Tree:
        """A tree that native code has made of a checked one: nothing is looked at again. `words` are its `ancestor_words`."""
        tree = object.__new__(Tree)
        tree.__dict__.update(
            tokens=tuple(tokens), parents=tuple(parents), logq=(), levels=(level,) * len(tokens), _depths=depths, _words=words)
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> list[int]:
        """Depth of each node; a child of the last committed token has depth 1."""
        known: list[int] | None = self.__dict__.get("_depths")
        if known is not None:
            return known
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def cut(self, depth: int) -> Tree:
        """The nodes of at most this depth, in the same order."""
        return self.select([i for i, at in enumerate(self.depths()) if at <= depth])

    def select(self, nodes: Collection[int]) -> Tree:
        """The tree of `nodes` alone, every one with its parent, in the same order."""
        if len(nodes) == len(self.tokens):
            return self
        kept = sorted(nodes)
        place = {-1: -1, **{node: i for i, node in enumerate(kept)}}
        return Tree(tuple(self.tokens[i] for i in kept), tuple(place[self.parents[i]] for i in kept),
                    tuple(self.logq[i] for i in kept) if self.logq else (), tuple(self.levels[i] for i in kept) if self.levels else ())


EMPTY = Tree()


def chain(tokens: Sequence[int]) -> Tree:
    """The tree of width 1 that proposes `tokens` one after the other."""
    return Tree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), (0.0,) * len(tokens), (0,) * len(tokens))


def ancestor_words(tree: Tree) -> list[int]:
    """Slots each verify row reads from scratch, itself included, as one 64-bit word per row.

    Row 0 is the last committed token (slot 0), row i + 1 is node i (slot i + 1). Slots grow along every path, so the
    set bits of a word are in order of position: the k-th set bit of a row is the key at position `committed + k`.
    """
    known: list[int] | None = tree.__dict__.get("_words")
    if known is not None:
        return known
    words = [1]
    for i, parent in enumerate(tree.parents):
        words.append(words[parent + 1] | (1 << (i + 1)))
    return words


def walk(tree: Tree, choices: Sequence[int]) -> tuple[list[int], list[int]]:
    """Follow the target's choices down the tree: (accepted node indices, tokens to commit).

    `choices[0]` is the target's choice after the last committed token, `choices[i + 1]` after node i. A node is accepted
    iff it equals its parent's choice (law L1); the last committed token is the bonus, so len(tokens) = len(nodes) + 1.
    """
    if not tree:
        return [], [choices[0]]
    nodes, tokens, at = list[int](), [choices[0]], -1
    for node, token in enumerate(tree.tokens):  # children come after their parent; of two equal siblings the first one wins
        if token == tokens[-1] and tree.parents[node] == at:
            nodes.append(node)
            at = node
            tokens.append(choices[node + 1])
    return nodes, tokens
