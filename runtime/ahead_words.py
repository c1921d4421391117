"""Words that an n-gram level on a device shares with its kernels (templates/triton/ngram_observe and _propose), of each sequence of a step.

CONTROL, i32, the host's to the device: what is to be observed and proposed. A block (its words: runtime/levels/ngram_native.py) must hold
BASE tokens; those that the host feeds come next, then what the step's choices brought. RESULT, i32, the device's to the host.
"""

from __future__ import annotations

CONTROL = 16  # words
BLOCK, BASE, FEED, FED, FOLLOWS, BUDGET, COUPLED, BEFORE, SEED = range(9)
# BLOCK: which one; -1: nothing is done.  FEED, FED: first of the fed tokens, how many.  FOLLOWS: 1, the new tokens of `followed` come next.
# BUDGET: nodes to propose.  COUPLED: 1, the request draws, by SEED (two words).  BEFORE: its tokens before those in the block.

RESULT = 4  # words in front of the nodes' tokens, their parents, their probabilities (f32), each as many as the level proposes at most
COUNT, LENGTH, LAST = range(3)  # nodes, -1: the block did not hold what it must, and was left alone; tokens that it holds; the last of them
CLEAR_PARTS = 16  # programs a sequence that empty its block
