"""Where a step's choices led, written by the program `follow` on the device: step input `followed`, i32[seqs, FOLLOWED_WORDS].

Law L1 walked down each sequence's tree, as runtime.tree.walk does it on the host. What drafts ahead reads it there: kernels that start
behind `follow` know what will be committed before the host does. Of a sequence (the entries of `seq_out` below 0 follow no choice):

  [NUM_ROWS]   its rows of the step that are committed: of a tree the last committed token's and those of accepted nodes; else all
  [NUM_TOKENS] new tokens: accepted nodes and the choice after them; 0 if it follows no choice
  [FIRST_ROW]  its first row in the step
  [DRAFTED]    1 if its rows are a tree's
  [ROWS + i]   of a tree: the step's row of its i-th committed row, by position; else [ROWS] is the first one, the others come after it
  [TOKENS + i] the i-th new token

Words beyond these counts hold anything. The host may commit less of it: where a request ends.
"""

from __future__ import annotations

from mlsdc.runtime.step import SCRATCH_SLOTS

NUM_ROWS, NUM_TOKENS, FIRST_ROW, DRAFTED = range(4)
ROWS = 4
TOKENS = ROWS + SCRATCH_SLOTS
