"""A step's items to rows in the step buffers, and the device's choices back to accepted nodes.

A sequence with drafted nodes sends its last committed token (scratch slot 0) and the nodes (slots 1..): it is *drafted*. Any other
sequence sends committed tokens, whose keys go to its pages at once: a prompt's chunk, or the one last token of a plain decode step, so
that decoding without drafts needs no scratch slab and no commit program (law L4).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from mlsdc.runtime.request import StepItem
from mlsdc.runtime.step import COMMITS, GROUPS, OUT, ROWS, SEQS, Cell, StepBuffers
from mlsdc.runtime.tree import ancestor_words


def write_rows(buffers: StepBuffers, items: Sequence[StepItem]) -> None:
    """Fill the step buffers for `items`; sets each item's `seq`, and its `out`, the first entry in `choices`, -1 if it wants none."""
    row = out = 0
    cells = buffers.cells
    width = buffers.page_table.shape[1]
    for seq, item in enumerate(items):
        if buffers.tail is not None and len(item.tree) > buffers.tail.recent:  # rows deeper than that could not read what they need
            item.tree = item.tree.cut(buffers.tail.recent)
        request, tree = item.request, item.tree
        first = request.num_computed
        item.seq = seq
        if tree:
            count = _write_tree(buffers, seq, row, item)
        elif item.rows == 1:  # a plain decode step
            count = 1
            cells.tokens[row] = request.tokens[first]
            cells.positions[row] = first
            cells.row_slot[row] = -1
            cells.ancestors[row] = 0
            cells.row_seq[row] = seq
        else:
            count = item.rows
            end = row + count
            buffers.tokens[row:end] = request.tokens[first : first + count]
            buffers.positions[row:end] = range(first, first + count)
            buffers.row_slot[row:end] = -1
            buffers.ancestors[row:end] = 0
            buffers.row_seq[row:end] = seq
        cells.seq_ctx[seq] = first
        cells.seq_row[seq] = row
        cells.seq_rows[seq] = count
        _write_list(cells.page_table, seq * width, request.table.pages)
        if buffers.tail is not None:
            _write_list(cells.tail_table, seq * buffers.tail_table.shape[1], request.table.tail)
        row += count
        wanted = item.outs = item.logit_rows
        item.out = out if wanted else -1
        cells.seq_out[seq] = out + wanted - 1 - len(tree) if item.decodes or item.wants_choice else -1
        if wanted == 1:
            cells.out_rows[out] = row - 1
        else:
            _write_list(cells.out_rows, out, range(row - wanted, row))
        out += wanted
    header = cells.header
    header[ROWS] = row
    header[SEQS] = len(items)
    header[OUT] = out
    header[COMMITS] = header[GROUPS] = 0


def _write_tree(buffers: StepBuffers, seq: int, row: int, item: StepItem) -> int:
    """The rows of a sequence that drafts: its last committed token and the nodes. Returns how many."""
    tree, request, cells = item.tree, item.request, buffers.cells
    first = request.num_computed
    count = 1 + len(tree)
    _write_list(cells.tokens, row, (request.tokens[first], *tree.tokens))
    _write_list(cells.positions, row, (first, *[first + depth for depth in tree.depths()]))
    _write_list(cells.row_slot, row, range(count))
    cells.ancestors[row : row + count] = array("L", ancestor_words(tree))
    _write_list(cells.row_seq, row, (seq,) * count)
    _write_list(cells.scratch_table, seq * buffers.scratch_table.shape[1], request.table.scratch)
    return count


def _write_list(cell: Cell, at: int, values: Sequence[int]) -> None:
    """`values` become the i32 from `at` on."""
    cell[at : at + len(values)] = array("i", values)


class CommitList:
    """What the commit program does after a step, written straight into the step buffers: token slots to copy from scratch to pages, or,
    in a grouped format, from scratch to the pages of the tail, and the groups that are full then."""

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
            place, at = divmod(position, size) if tail is None else tail.place(position)
            self.target.append((table.pages if tail is None else table.tail)[place] * size + at)
            position += 1
            if tail is not None and position % tail.group == 0:
                self.groups.append((table.pages[position // tail.group - 1], item.seq, position - tail.group))
                # its pages may have moved since the rows were written: levels that work ahead take theirs while the step runs
                _write_list(self.buffers.cells.tail_table, item.seq * self.buffers.tail_table.shape[1], table.tail)

    def write(self) -> bool:
        """Fill the inputs of the commit program; False if there is nothing to do."""
        count, buffers = len(self.source), self.buffers
        if not count:
            return False
        buffers.commit_src[:count] = self.source
        buffers.commit_dst[:count] = self.target
        buffers.cells.header[COMMITS] = count
        buffers.cells.header[GROUPS] = len(self.groups)
        for i, group in enumerate(self.groups):
            buffers.group_page[i], buffers.group_seq[i], buffers.group_first[i] = group
        return True
