"""Where the controller's native code (templates/tir/draft_choose, draft_learn) finds its numbers: one table for both sides.

A *slot* is a request's place in arrays of `slots` rows. A tree is 3 * 64 i32: tokens, parents, and the number of nodes at [128].
"""

from __future__ import annotations

NODES = 64  # of a slot's row in every array of nodes
TREE = 3 * NODES
COUNT = 2 * NODES  # in a tree's row: how many nodes
KEPT = 4 * NODES  # a slot's row of what is sent: tokens, parents, depths, the proposal's node
SCRATCH = 3 * NODES  # a slot's row of work space: depths, order of chances, flags; how many are in order at [LAST]
LAST = 3 * NODES - 1

# a step, f64
ROWS, SEQUENCES, DRAFT_S, STALE, SCALE, ASKED, LAST_ROWS, MOST_S, DRAFTED_SCALE, SHORTEST, TRIALS = range(11)
STEP_WORDS = 16

# a drafter, f64: what runtime/controller.py keeps of a request, then (hit, mass) by level and depth
TIMES_ASKED, WORTH, TAKEN, PAUSE, LAST_PAUSE, PAUSED_AT, SAMPLED = range(7)
OWN = 8
OWN_RATE = 2
ALL_RATE = 3  # of everyone: (hit, mass, count) by level and depth, those of greedy requests first
