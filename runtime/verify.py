"""A step's items to rows in the step buffers, and the device's choices back to accepted nodes.

A sequence with drafted nodes sends its last committed token (scratch slot 0) and the nodes (slots 1..): it is *drafted*. Any other
sequence sends committed tokens, whose keys go to its pages at once: a prompt's chunk, or the one last token of a plain decode step, so
that decoding without drafts needs no scratch slab and no commit program (law L4).
"""

from __future__ import annotations

from collections.abc import Sequence

from mlsdc.runtime.request import StepItem
from mlsdc.runtime.step import Header, StepBuffers
from mlsdc.runtime.tree import ancestor_words


def write_rows(buffers: StepBuffers, items: Sequence[StepItem]) -> None:
    """Fill the step buffers for `items`; sets each item's `seq`, and its `out`, the first entry in `choices`, -1 if it wants none."""
    row = out = 0
    for seq, item in enumerate(items):
        if buffers.tail is not None and len(item.tree) > buffers.tail.recent:  # rows deeper than that could not read what they need
            item.tree = item.tree.cut(buffers.tail.recent)
        request, tree = item.request, item.tree
        first = request.num_computed
        item.seq = seq
        if tree:
            count = _write_tree(buffers, seq, row, item)
        elif item.rows == 1:  # a plain decode step: scalars, a third of the cost of slices
            count = 1
            buffers.tokens[row] = request.tokens[first]
            buffers.positions[row] = first
            buffers.row_slot[row] = -1
            buffers.ancestors[row] = 0
            buffers.row_seq[row] = seq
        else:
            count = item.rows
            end = row + count
            buffers.tokens[row:end] = request.tokens[first : first + count]
            buffers.positions[row:end] = range(first, first + count)
            buffers.row_slot[row:end] = -1
            buffers.ancestors[row:end] = 0
            buffers.row_seq[row:end] = seq
        buffers.seq_ctx[seq] = first
        buffers.seq_row[seq] = row
        buffers.seq_rows[seq] = count
        pages = request.table.pages
        buffers.page_table[seq, : len(pages)] = pages
        if buffers.tail is not None:
            tail = request.table.tail
            buffers.tail_table[seq, : len(tail)] = tail
        row += count
        wanted = item.outs = item.logit_rows
        item.out = out if wanted else -1
        if wanted == 1:
            buffers.out_rows[out] = row - 1
        else:
            buffers.out_rows[out : out + wanted] = range(row - wanted, row)
        out += wanted
    header = buffers.header
    header[Header.ROWS] = row
    header[Header.SEQS] = len(items)
    header[Header.OUT] = out
    header[Header.COMMITS] = header[Header.GROUPS] = 0


def _write_tree(buffers: StepBuffers, seq: int, row: int, item: StepItem) -> int:
    """The rows of a sequence that drafts: its last committed token and the nodes. Returns how many."""
    tree, request = item.tree, item.request
    first = request.num_computed
    count = 1 + len(tree)
    end = row + count
    buffers.tokens[row:end] = (request.tokens[first], *tree.tokens)
    buffers.positions[row:end] = (first, *(first + depth for depth in tree.depths()))
    buffers.row_slot[row:end] = range(count)
    buffers.ancestors[row:end] = ancestor_words(tree)
    buffers.row_seq[row:end] = seq
    scratch = request.table.scratch
    buffers.scratch_table[seq, : len(scratch)] = scratch
    return count


class CommitList:
    """What the commit program does after a step, written straight into the step buffers: token slots to copy from scratch to pages, or,
    in a grouped format, from scratch to the ring of the tail, and the groups that are full then."""

    def __init__(self, buffers: StepBuffers) -> None:
        self.buffers = buffers
        self.source: list[int] = []
        self.target: list[int] = []
        self.groups: list[tuple[int, int, int]] = []  # (page, row of tail_table, position of the first token)

    def add(self, item: StepItem, nodes: Sequence[int]) -> None:
        """The item's last committed token and these accepted nodes become the positions from `num_computed` on."""
        table, tail = item.request.table, self.buffers.tail
        size = self.buffers.page_size if tail is None else tail.page_size
        position = item.request.num_computed
        for slot in (0, *(node + 1 for node in nodes)):
            self.source.append(table.scratch[slot // size] * size + slot % size)
            at = position if tail is None else position % tail.slots
            self.target.append((table.pages if tail is None else table.tail)[at // size] * size + at % size)
            position += 1
            if tail is not None and position % tail.group == 0:
                self.groups.append((table.pages[position // tail.group - 1], item.seq, position - tail.group))

    def write(self) -> bool:
        """Fill the inputs of the commit program; False if there is nothing to do."""
        count, buffers = len(self.source), self.buffers
        if not count:
            return False
        buffers.commit_src[:count] = self.source
        buffers.commit_dst[:count] = self.target
        buffers.header[Header.COMMITS] = count
        buffers.header[Header.GROUPS] = len(self.groups)
        for i, group in enumerate(self.groups):
            buffers.group_page[i], buffers.group_seq[i], buffers.group_first[i] = group
        return True
