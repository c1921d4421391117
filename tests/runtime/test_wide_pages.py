"""Pages of a grouped format: whatever is begun, reused, forked, drafted, preempted and ended, a sequence reads back what it wrote."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsdc.runtime.errors import CapacityError
from mlsdc.runtime.kv_pool import KvPool, PageTable
from mlsdc.runtime.pages import Pages
from mlsdc.runtime.slabs import SlabPool, slab_bytes_for
from mlsdc.runtime.wide_pages import Tail, WidePages

STALE = -1


class Bytes:
    """What lies in pages of one kind, as token lists."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[int, list[int]] = {}

    def page(self, page: int) -> list[int]:
        return self.pages.setdefault(page, [STALE] * self.page_size)

    def copy(self, source: int, target: int) -> None:
        self.pages[target] = list(self.page(source))

    def poison(self, pool: Pages) -> None:
        for page in pool.free_pages():
            self.pages.pop(page, None)


class Sequence:
    """A request: `tokens` of which `written` are committed."""

    def __init__(self, table: PageTable, tokens: list[int], scratch: int) -> None:
        self.table = table
        self.tokens = tokens
        self.written = table.num_cached
        self.scratch = scratch


class Grouped:
    """A level of a grouped format under random use, over memory that a kernel of that format would write."""

    def __init__(self, rng: random.Random, slabs: SlabPool, tail: Tail, narrow_bytes: int, wide_bytes: int) -> None:
        self.rng, self.tail = rng, tail
        self.narrow, self.broad = Bytes(tail.group), Bytes(tail.page_size)
        self.wide = WidePages(slabs, wide_bytes, tail, copy_page=self.broad.copy)
        self.pool = KvPool(slabs, tail.group, narrow_bytes, copy_page=self.narrow.copy, wide=self.wide)
        self.live: list[Sequence] = []
        self.hits = 0

    def commit(self, sequence: Sequence, end: int) -> None:
        """Write positions up to `end`: 16 bits into the ring, groups that become full into their page from there, as a step does."""
        table, tail = sequence.table, self.tail
        for position in range(sequence.written, end):
            place, slot = tail.place(position)
            self.broad.page(table.tail[place])[slot] = sequence.tokens[position]
            if (position + 1) % tail.group == 0:
                group = range(position + 1 - tail.group, position + 1)
                self.narrow.page(table.pages[position // tail.group])[:] = [self.in_16_bits(table, p) for p in group]
        sequence.written = end

    def in_16_bits(self, table: PageTable, position: int) -> int:
        place, slot = self.tail.place(position)
        return self.broad.page(table.tail[place])[slot]

    def read(self, sequence: Sequence) -> list[int]:
        """Every committed token as the next query reads it: quantised groups from pages, the first ones and the others in 16 bits."""
        border, table = self.tail.first_needed(sequence.written), sequence.table
        first = min(self.tail.sinks, sequence.written)
        pages = [self.narrow.page(table.pages[p // self.tail.group])[p % self.tail.group] for p in range(first, border)]
        plain = [self.in_16_bits(table, p) for p in (*range(first), *range(max(first, border), sequence.written))]
        return plain[:first] + pages + plain[first:]

    def act(self) -> None:
        roll = self.rng.random()
        if roll < 0.2 or not self.live:
            self.begin()
            return
        sequence = self.rng.choice(self.live)
        if roll < 0.75:
            if sequence.written < len(sequence.tokens) - 1:
                self.prefill(sequence)
            else:
                self.decode(sequence)
        elif roll < 0.85:
            self.fork(sequence)
        elif roll < 0.9:
            self.preempt(sequence)
        else:
            self.end(sequence)

    def begin(self) -> None:
        rng, group = self.rng, self.tail.group
        known = rng.choice(self.live).tokens if self.live and rng.random() < 0.6 else []
        tokens = known[: rng.randint(0, len(known))] + [rng.randrange(2) for _ in range(rng.randint(1, 5 * group))]
        self.admit(tokens, rng.randint(0, 2))

    def admit(self, tokens: list[int], scratch: int) -> None:
        room = len(tokens) + 1
        if not self.pool.can_allocate(tokens, room, scratch):
            with pytest.raises(CapacityError, match="no room for"):
                self.pool.allocate(tokens, room, scratch)
            return
        sequence = Sequence(self.pool.allocate(tokens, room, scratch), tokens, scratch)
        self.hits += sequence.written > 0
        self.live.append(sequence)

    def prefill(self, sequence: Sequence) -> None:
        left = len(sequence.tokens) - 1 - sequence.written
        count = self.pool.chunk(sequence.written, self.rng.randint(1, left), len(sequence.tokens))
        self.pool.prepare(sequence.table, sequence.written, sequence.written + count)
        self.commit(sequence, sequence.written + count)
        self.pool.seal(sequence.table, sequence.tokens, sequence.written)

    def decode(self, sequence: Sequence) -> None:
        """The last token and a draft of at most R nodes, of which some are accepted."""
        drafted = self.rng.randint(0, self.tail.recent - 1)
        room = len(sequence.tokens) + drafted
        if not self.pool.can_append(sequence.table, room, sequence.written):
            with pytest.raises(CapacityError):
                self.pool.append(sequence.table, room, sequence.written)
            return
        self.pool.append(sequence.table, room, sequence.written)
        assert self.read(sequence) == sequence.tokens[: sequence.written], "rows of the step read the cache before anything is committed"
        accepted = self.rng.randint(0, drafted)
        sequence.tokens += [self.rng.randrange(2) for _ in range(accepted + 1)]
        self.commit(sequence, len(sequence.tokens) - 1)
        self.pool.seal(sequence.table, sequence.tokens, sequence.written)
        self.pool.trim(sequence.table, len(sequence.tokens))

    def fork(self, parent: Sequence) -> None:
        count = self.rng.randint(max(0, parent.written - 3), parent.written)
        scratch = self.rng.randint(0, 2)
        if not count or not self.pool.can_fork(parent.table, count, parent.written, scratch):
            return
        table = self.pool.fork(parent.table, count, scratch)
        sequence = Sequence(table, [*parent.tokens[:count], self.rng.randrange(2)], scratch)
        assert self.pool.can_append(table, count + 1, count)
        self.pool.append(table, count + 1, count)
        self.live.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        self.end(sequence)
        self.admit(sequence.tokens, sequence.scratch)

    def end(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        self.pool.free(sequence.table)

    def check(self) -> None:
        self.pool.check_integrity([sequence.table for sequence in self.live])
        self.narrow.poison(self.pool)
        self.broad.poison(self.wide)

    def check_bytes(self) -> None:
        for sequence in self.live:
            assert self.read(sequence) == sequence.tokens[: sequence.written]

    def check_waste(self) -> None:
        """At most one page of each kind is not filled, scratch slabs aside."""
        for sequence in self.live:
            assert len(sequence.table.pages) <= self.pool.pages_for(len(sequence.tokens) + 1)
            drafted = len(sequence.tokens) + self.tail.recent
            assert len(sequence.table.tail) <= min(-(-drafted // self.tail.page_size), self.tail.num_pages)


def make(rng: random.Random, tail: Tail, pages: int, narrow_bytes: int, wide_bytes: int, slab_bytes: int | None = None) -> Grouped:
    pool_bytes = pages * narrow_bytes
    slab = slab_bytes or slab_bytes_for([narrow_bytes, wide_bytes], pool_bytes)
    return Grouped(rng, SlabPool(pool_bytes // slab, slab), tail, narrow_bytes, wide_bytes)


@pytest.mark.parametrize(("recent", "group", "page_size"), [(4, 4, 4), (4, 8, 4), (8, 4, 2), (4, 4, 1)])
def test_integrity_holds_after_every_one_of_100k_random_operations(recent: int, group: int, page_size: int) -> None:
    rng = random.Random(recent + group)
    level = make(rng, Tail(recent, group, page_size), 160, 5, 16 * page_size // 4, slab_bytes=80)
    for step in range(25_000):
        level.act()
        level.check()
        if step % 10 == 0:
            level.check_bytes()
            level.check_waste()
    assert level.hits > 100
    for sequence in list(level.live):
        level.end(sequence)
    level.check()


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([(2, 2, 1), (4, 4, 4), (4, 8, 2), (8, 4, 4), (6, 6, 3)]), st.integers(40, 90),
       st.sampled_from([(5, 16), (3, 7), (8, 8), (16, 5)]), st.integers(30, 120))
def test_sequences_read_what_they_wrote(seed: int, tail: tuple[int, int, int], pages: int, page_bytes: tuple[int, int], slab: int) -> None:
    level = make(random.Random(seed), Tail(*tail), pages, *page_bytes, slab_bytes=slab)
    for _ in range(200):
        level.act()
        level.check()
        level.check_bytes()


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_two_grouped_levels_share_one_pool(seed: int) -> None:
    rng = random.Random(seed)
    slabs = SlabPool(24, 60)
    levels = [Grouped(rng, slabs, Tail(4, 4, 4), 5, 15), Grouped(rng, slabs, Tail(4, 8, 4), 6, 10)]
    for _ in range(300):
        rng.choice(levels).act()
        for level in levels:
            level.check()
            level.check_bytes()


def test_a_hit_is_shortened_to_the_longest_checkpoint() -> None:
    level = make(random.Random(0), Tail(4, 4, 4), 64, 5, 16)
    prompt = [0, 1] * 20
    level.admit([*prompt, 7], 0)
    (first,) = level.live
    while first.written < len(prompt):
        level.prefill(first)
    assert len(level.pool.lookup([*prompt, 7, 8])) == 10, "the last page boundary of the prompt is one"
    level.pool.wide.drop(first.table.chain)  # type: ignore[union-attr]
    assert level.pool.lookup([*prompt, 7, 8]) == []


def test_a_finished_request_leaves_its_last_page_boundary() -> None:
    level = make(random.Random(1), Tail(4, 8, 4), 200, 5, 16)
    level.admit([1] * 9, 0)
    (first,) = level.live
    while first.written < 8:
        level.prefill(first)
    for _ in range(40):
        first.tokens.append(len(first.tokens))
        level.pool.append(first.table, len(first.tokens), first.written)
        level.commit(first, len(first.tokens) - 1)
        level.pool.seal(first.table, first.tokens, first.written)
    tokens = list(first.tokens)
    level.end(first)
    assert len(level.pool.lookup([*tokens, 1])) == (len(tokens) - 1) // 8
    assert len(level.pool.lookup(tokens[:20])) == 1, "of those before only the prompt's is kept"


def test_long_prompts_are_kept_at_every_512_tokens() -> None:
    level = make(random.Random(2), Tail(32, 64, 32), 400, 20, 40)
    prompt = [1] * 1300
    level.admit(prompt, 0)
    (first,) = level.live
    while first.written < len(prompt) - 1:
        count = level.pool.chunk(first.written, min(200, len(prompt) - 1 - first.written), len(prompt))
        level.pool.prepare(first.table, first.written, first.written + count)
        level.commit(first, first.written + count)
        level.pool.seal(first.table, first.tokens, first.written)
    assert len(level.pool.lookup([1] * 1290)) == 20
    assert len(level.pool.lookup([1] * 1200)) == 16
    assert len(level.pool.lookup([1] * 1000)) == 8


def test_checkpoints_give_way_where_pages_are_short() -> None:
    level = make(random.Random(3), Tail(4, 4, 4), 48, 4, 4, slab_bytes=8)
    for start in range(6):
        level.admit([start] * 13, 0)
        sequence = level.live[-1]
        while sequence.written < 12:
            level.prefill(sequence)
        level.end(sequence)
    room = level.pool.source.num_slabs * 2
    table = level.pool.allocate([9] * 100, 4 * (room - 4) - 3)
    level.pool.check_integrity([table])


@pytest.mark.parametrize("tail", [(4, 4, 3), (4, 6, 4), (0, 4, 4)])
def test_a_wide_page_divides_the_tail(tail: tuple[int, int, int]) -> None:
    with pytest.raises(CapacityError, match="expected a divisor of"):
        Tail(*tail)


def test_a_group_is_a_page() -> None:
    slabs = SlabPool(4, 64)
    with pytest.raises(CapacityError, match="a group is a page"):
        KvPool(slabs, 8, 4, wide=WidePages(slabs, 8, Tail(4, 4, 4)))


def test_a_corrupted_page_table_is_named() -> None:
    level = make(random.Random(4), Tail(4, 4, 4), 48, 4, 4, slab_bytes=8)
    level.admit([1] * 9, 1)
    (first,) = level.live
    good = list(first.table.tail)
    for bad, message in (([99_999], "a table names page 99999"), ([good[0], good[0]], "in 2 tables but counted 1 times"),
                         ([*good, *good], "in 2 tables but counted 1")):
        first.table.tail[:] = bad
        with pytest.raises(CapacityError, match=f"kv tail pool: .*{message}"):
            level.check()
    first.table.tail[:] = good
    level.check()
