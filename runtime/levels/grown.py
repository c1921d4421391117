"""Trees that grow on the device: the rounds of a growing level (growing.py) as one launch list, `trees`, that is waited for once.

The list is the level's `draft` list again and again, with a launch after each that does what the host would: it takes the guesses of the
rows, keeps the likeliest nodes, and writes the next round's rows into the step inputs (templates/triton/grow.py.jinja). The host says how
each tree grows in a record of `growth`, and finds the tree in `grown`: how many nodes; where rows were made behind the target's step, what
COMMITTED has come to and the last token; then the nodes' tokens, their parents, and the bits of their log probabilities as f32, MOST each.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from mlsdc.runtime.step import SCRATCH_SLOTS, Array
from mlsdc.runtime.tree import EMPTY, Tree

if TYPE_CHECKING:
    from mlsdc.runtime.levels.coupling import Draw

SPREAD = 8  # rows of a request in one round: a tile
CHILDREN = 8  # guesses of a row, at most
MOST = SCRATCH_SLOTS  # nodes of a tree between two rounds
PROGRAM = "trees"
AHEAD = "ahead"  # a level's list that runs behind the target's step
MADE_THERE = frozenset({  # by it
    "tokens", "positions", "row_seq", "row_slot", "ancestors", "seq_row", "seq_rows", "out_rows", "features", "taps"})


class Growing(enum.IntEnum):
    """Words of a sequence's record in `growth` f8[GROWTH_WORDS]."""

    BUDGET = 0  # nodes of the tree
    COMMITTED = 1  # positions in pages when its own rows begin
    STRIDE = 2  # rows of a round, the same for all sequences of a run: sequence i has those from i * STRIDE on
    SLOTS = 3  # scratch slots in use before the first round's guesses become rows
    MOST_SLOTS = 4
    ROOT = 5  # 1: the last token itself is the row in slot 0
    SHIFT = 6  # a guess of the row at position p is of the token at p + SHIFT of the sequence
    TURN = 7  # and those of the first round's row are of the token at TURN
    FLOOR = 8  # log probability that a node's path must be above
    LEAST = 9  # and that a node's path must have to get children
    LAST = 10  # the last token
    INV_T = 11  # 0: the request does not draw, and the words behind mean nothing
    SEED = 12  # u64, its bits
    TOP_K = 13  # 0: all
    TOP_P = 14
    MIN_P = 15
    # where rows are made behind the target's step (templates/triton/ahead_rows.py.jinja), COMMITTED and TURN count on from before it
    OF = 16  # the sequence's place in the target's step
    FIRST = 17  # its first row
    ROOM = 18  # rows kept for it: as many as the step can commit


GROWTH_WORDS = len(Growing)
HEAD = 3  # words in front of a tree
GROWN_WORDS = HEAD + 3 * MOST
FIELDS = 6  # of a node, i64 each, in `nodes`: templates/triton/grow.py.jinja
NODES = MOST + SPREAD * CHILDREN  # after a round, before the less likely ones are dropped; a power of two
NODE_WORDS = (FIELDS + 1) * NODES + 16  # with their new places, and counters


def grown_widths(widths: Mapping[str, int], used: Collection[str]) -> dict[str, int]:
    """Widths of the step inputs for trees that grow on the device, if programs use them; `widths` are the level's own."""
    hidden = (SCRATCH_SLOTS + 1) * widths["features"] if "rows_hidden" in used else 0
    return {"growth": GROWTH_WORDS, "nodes": NODE_WORDS if "nodes" in used else 0, "grown": GROWN_WORDS, "hidden": hidden}


def write_record(record: Array, values: Mapping[Growing, float], draw: Draw | None) -> None:
    """One sequence's `growth` f8[GROWTH_WORDS]."""
    for word, value in values.items():
        record[word] = value
    record[Growing.INV_T] = 0.0 if draw is None else 1 / draw.temperature
    if draw is not None:
        record[Growing.SEED : Growing.SEED + 1].view(np.uint64)[0] = draw.seed
        record[Growing.TOP_K], record[Growing.TOP_P], record[Growing.MIN_P] = draw.top_k, draw.top_p, draw.min_p


def read_tree(found: Array, level: int) -> Tree:
    """What grew, as nodes of level `level`: a sequence's words of `grown`."""
    count = int(found[0])
    if not count:
        return EMPTY
    tokens, parents, logq = (found[HEAD + i * MOST : HEAD + i * MOST + count] for i in range(3))
    return Tree(tuple(tokens.tolist()), tuple(parents.tolist()), tuple(logq.view(np.float32).tolist()), (level,) * count)
