"""The fake device with a grouped cache format: groups of tokens in pages once they are full, the first and the last ones in wide pages.

It reads as law L3 says (a group as quantised iff it ends at p - R or before, but for a sequence's first tokens, else from the 16-bit form)
and raises for any slot that holds another position than the row expects, so a page that is missing, stale or somebody else's cannot go
unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fake_device import POISON, VOCAB, FakeDevice, FakeMemory, choose, make_manifest

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.kv_tail import Tail
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.slabs import SlabPool
from mlsdc.runtime.step import Header, Limits, StepBuffers
from tests.function_level import sends_all

EIGHTS = Tail(8, 8, 8)


class GroupedMemory(FakeMemory):
    def __init__(self, limits: Limits, tail: Tail, pool_bytes: int, vocab: int, page_bytes: int, wide_bytes: int) -> None:
        super().__init__(limits, tail.group, pool_bytes // page_bytes, vocab)
        self.buffers = StepBuffers(limits, tail.group, {"masks": 1}, tail)
        self.tail, self.page_bytes, self.wide_bytes = tail, page_bytes, wide_bytes
        self.wide = np.full((pool_bytes // wide_bytes * tail.page_size, 2), POISON, np.int32)

    def copy_wide(self, source: int, target: int) -> None:
        size = self.tail.page_size
        self.wide[target * size : (target + 1) * size] = self.wide[source * size : (source + 1) * size]

    def poison_wide(self, page: int) -> None:
        self.wide[page * self.tail.page_size : (page + 1) * self.tail.page_size] = POISON

    def ring_slot(self, seq: int, position: int) -> int:
        place, slot = self.tail.place(position)
        return int(self.buffers.tail_table[seq, place]) * self.tail.page_size + slot

    def scratch_slot(self, seq: int, slot: int) -> int:
        return int(self.buffers.scratch_table[seq, slot // self.tail.page_size]) * self.tail.page_size + slot % self.tail.page_size

    def fill_group(self, page: int, seq: int, first: int, rows: dict[int, tuple[int, int]]) -> None:
        """Quantise: the group's tokens, from this step's rows or from the ring, go to a page."""
        group = self.tail.group
        for i in range(group):
            self.slots[page * group + i] = rows.get(first + i, tuple(self.wide[self.ring_slot(seq, first + i)]))
        assert self.slots[page * group : (page + 1) * group, 1].tolist() == list(range(first, first + group))

    def forward(self) -> None:
        b, group = self.buffers, self.tail.group
        rows, seqs, outs = (int(b.header[w]) for w in (Header.ROWS, Header.SEQS, Header.OUT))
        self.rows_run.append(rows)
        self.chunks: list[dict[int, tuple[int, int]]] = [{} for _ in range(seqs)]  # of a prefilled sequence: its rows by position
        for row in range(rows):
            seq, slot = int(b.row_seq[row]), int(b.row_slot[row])
            token = int(b.tokens[row]), int(b.positions[row])
            if slot < 0:
                self.chunks[seq][token[1]] = token
            else:
                self.wide[self.scratch_slot(seq, slot)] = token
        for seq, chunk in enumerate(self.chunks):
            for position in chunk:
                if (position + 1) % group == 0:
                    self.fill_group(int(b.page_table[seq, position // group]), seq, position + 1 - group, chunk)
        self.seen = [self.visible(int(b.out_rows[out])) for out in range(outs)]
        for out in range(outs):
            b.choices[out] = choose(self.seen[out], self.vocab)
        for seq, chunk in enumerate(self.chunks):
            for position in (p for p in chunk if p < self.tail.sinks or p > max(chunk) - self.tail.slots):
                self.wide[self.ring_slot(seq, position)] = chunk[position]

    def visible(self, row: int) -> list[int]:
        b, group = self.buffers, self.tail.group
        seq, slot, position = int(b.row_seq[row]), int(b.row_slot[row]), int(b.positions[row])
        committed = position + 1 if slot < 0 else int(b.seq_ctx[seq])
        border = min(self.tail.first_needed(position), committed)
        read = []
        for at in range(committed):
            if self.tail.sinks <= at < border:
                read.append(tuple(self.slots[int(b.page_table[seq, at // group]) * group + at % group]))
            elif at in self.chunks[seq]:
                read.append(self.chunks[seq][at])
            else:
                read.append(tuple(self.wide[self.ring_slot(seq, at)]))
        if slot >= 0:
            word = int(b.ancestors[row])
            read += [tuple(self.wide[self.scratch_slot(seq, bit)]) for bit in range(64) if word >> bit & 1]
        found = [int(at) for _, at in read]
        assert found == list(range(position + 1)), f"row {row} of sequence {seq} reads positions {found}"
        return [int(token) for token, _ in read]

    def commit(self) -> None:
        b = self.buffers
        count, groups = int(b.header[Header.COMMITS]), int(b.header[Header.GROUPS])
        self.wide[b.commit_dst[:count]] = self.wide[b.commit_src[:count]]
        for i in range(groups):
            self.fill_group(int(b.group_page[i]), int(b.group_seq[i]), int(b.group_first[i]), {})


def make_grouped(level: Level | None = None, *, tail: Tail = EIGHTS, slabs: int = 60, slab_bytes: int = 60, page_bytes: int = 5,
                 wide_bytes: int = 15, max_model_len: int = 96, max_num_seqs: int = 8, max_num_batched_tokens: int = 40,
                 max_tree_nodes: int = 16, drafts: int = 8) -> Engine:
    """An engine over the fake device with a grouped format. `engine._memory` is a GroupedMemory."""
    limits = Limits(max_model_len, max_num_seqs, max_num_batched_tokens, max_num_batched_tokens, max_tree_nodes)
    info = [LevelInfo(level.name, level.kind, {})] if level else []
    manifest = make_manifest(limits, drafts=drafts, levels=info)
    memory = GroupedMemory(limits, tail, slabs * slab_bytes, VOCAB, page_bytes, wide_bytes)
    return sends_all(Engine(manifest, FakeDevice(), memory, [level] if level else [], slabs=SlabPool(slabs, slab_bytes)))


def poison(engine: Engine) -> None:
    """Spoil every page that nobody owns and nothing is known of."""
    memory, pool = engine._memory, engine.pool
    assert isinstance(memory, GroupedMemory)
    assert pool.wide is not None
    size = memory.tail.group
    for page in pool.free_pages():
        memory.slots[page * size : (page + 1) * size] = POISON
    for page in pool.wide.free_pages():
        memory.poison_wide(page)


def committed(engine: Engine, pages: Sequence[int], tail_pages: Sequence[int], length: int) -> list[tuple[int, int]]:
    """(token, position) of every committed position as the next row reads it."""
    memory = engine._memory
    assert isinstance(memory, GroupedMemory)
    tail, group = memory.tail, memory.tail.group
    found = []
    for at in range(length):
        if tail.sinks <= at < tail.first_needed(length):
            found.append(memory.slots[pages[at // group] * group + at % group])
        else:
            place, slot = tail.place(at)
            found.append(memory.wide[tail_pages[place] * tail.page_size + slot])
    return [(int(token), int(position)) for token, position in found]
