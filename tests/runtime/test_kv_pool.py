"""The page pool: integrity under any operations, reuse of exactly equal prefixes, nothing changed by a refusal."""

from __future__ import annotations

import random

import pytest

from mlsdc.runtime.errors import CapacityError
from mlsdc.runtime.kv_pool import KvPool, PageTable
from mlsdc.runtime.slabs import SlabPool, slab_bytes_for


class Bytes:
    """Pages as token lists, written only where a table may write; what a sequence reads back must be what it wrote."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[int, list[int]] = {}

    def copy(self, source: int, target: int) -> None:
        self.pages[target] = list(self.pages.get(source, [-1] * self.page_size))

    def write(self, table: PageTable, tokens: list[int], start: int, end: int) -> None:
        for i in range(start, end):
            self.pages.setdefault(table.pages[i // self.page_size], [-1] * self.page_size)[i % self.page_size] = tokens[i]

    def read(self, table: PageTable, count: int) -> list[int]:
        return [self.pages[table.pages[i // self.page_size]][i % self.page_size] for i in range(count)]


class Level:
    """A pool under random use: sequences are begun, grown, drafted for, sealed, forked and ended."""

    def __init__(self, rng: random.Random, pool: KvPool, memory: Bytes) -> None:
        self.rng = rng
        self.pool = pool
        self.memory = memory
        self.live: list[tuple[PageTable, list[int]]] = []  # tables and what is written

    def act(self) -> None:
        rng, pool, size = self.rng, self.pool, self.pool.page_size
        roll = rng.random()
        if roll < 0.25 or not self.live:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 6 * size))]
            scratch, room = rng.randint(0, 3), len(tokens) + rng.randint(0, size)
            if pool.can_allocate(tokens, room, scratch):
                table = pool.allocate(tokens, room, scratch)
                self.memory.write(table, tokens, table.num_cached, len(tokens))
                self.live.append((table, tokens))
            else:
                with pytest.raises(CapacityError):
                    pool.allocate(tokens, room, scratch)
            return
        table, tokens = rng.choice(self.live)
        if roll < 0.5:  # a step: room for a draft, of which some is committed
            drafted = rng.randint(1, 2 * size)
            if not pool.can_append(table, len(tokens) + drafted, len(tokens)):
                with pytest.raises(CapacityError):
                    pool.append(table, len(tokens) + drafted, len(tokens))
                return
            pool.append(table, len(tokens) + drafted, len(tokens))
            start = len(tokens)
            tokens += [rng.randrange(2) for _ in range(rng.randint(1, drafted))]
            self.memory.write(table, tokens, start, len(tokens))
            if rng.random() < 0.5:
                pool.trim(table, len(tokens))
        elif roll < 0.65:
            pool.seal(table, tokens, rng.randint(0, len(tokens)))
        elif roll < 0.75:
            count, scratch = rng.randint(1, len(tokens)), rng.randint(0, 2)
            if scratch <= pool.num_available:
                self.live.append((pool.fork(table, count, scratch), tokens[:count]))
        else:
            self.live.remove((table, tokens))
            pool.free(table)

    def check(self) -> None:
        self.pool.check_integrity([table for table, _ in self.live])
        for table, tokens in self.live:
            assert self.memory.read(table, len(tokens)) == tokens

    def end(self) -> None:
        for table, _ in self.live:
            self.pool.free(table)
        self.live = []


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_integrity_and_bytes_hold_under_100k_random_operations(page_size: int) -> None:
    rng = random.Random(page_size)
    memory = Bytes(page_size)
    level = Level(rng, KvPool.alone(40, page_size, copy_page=memory.copy), memory)
    for step in range(100_000):
        level.act()
        if step % 200 == 0:
            level.check()
    level.end()
    level.check()
    assert level.pool.num_available == level.pool.num_pages


def test_a_known_prefix_is_reused_page_by_page() -> None:
    pool = KvPool.alone(10, 4)
    first = pool.allocate(list(range(10)), 10)
    pool.seal(first, list(range(10)), 10)
    second = pool.allocate([*range(8), 99, 98], 10)
    assert second.num_cached == 8
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]


def test_a_prefix_stays_known_after_its_owner_is_gone() -> None:
    pool = KvPool.alone(10, 4)
    table = pool.allocate(list(range(10)), 10)
    pool.seal(table, list(range(10)), 10)
    pages = list(table.pages)
    pool.free(table)
    assert pool.lookup(list(range(10))) == pages[:2]


def test_the_last_token_is_always_left_to_compute() -> None:
    pool = KvPool.alone(10, 4)
    table = pool.allocate(list(range(8)), 8)
    pool.seal(table, list(range(8)), 8)
    assert len(pool.lookup(list(range(8)))) == 1


def test_equal_tokens_after_different_beginnings_are_not_shared() -> None:
    pool = KvPool.alone(10, 4)
    table = pool.allocate([1, 1, 1, 1, 7, 7, 7, 7, 5], 9)
    pool.seal(table, [1, 1, 1, 1, 7, 7, 7, 7, 5], 8)
    assert pool.lookup([2, 2, 2, 2, 7, 7, 7, 7, 5]) == []
    assert pool.lookup([7, 7, 7, 7, 5]) == []


def test_hash_collisions_cannot_share_a_page() -> None:
    class Same(int):
        def __hash__(self) -> int:
            return 1

    pool = KvPool.alone(10, 2)
    table = pool.allocate([Same(1), Same(2), Same(3)], 3)
    pool.seal(table, [Same(1), Same(2), Same(3)], 3)
    assert pool.lookup([Same(2), Same(1), Same(3)]) == []
    assert len(pool.lookup([Same(1), Same(2), Same(3)])) == 1


def test_cached_pages_give_way_the_end_of_the_oldest_chain_first() -> None:
    pool = KvPool.alone(4, 2)
    table = pool.allocate([1, 2, 3, 4, 5, 6, 7, 8], 8)
    pool.seal(table, [1, 2, 3, 4, 5, 6, 7, 8], 8)
    pool.free(table)
    pool.allocate([9], 1)
    assert len(pool.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 3


def test_two_sequences_that_computed_the_same_page_keep_their_own() -> None:
    pool = KvPool.alone(10, 2)
    one, two = pool.allocate([1, 2, 3, 4, 5], 5), pool.allocate([1, 2, 3, 4, 5], 5)
    pool.seal(one, [1, 2, 3, 4, 5], 5)
    pool.seal(two, [1, 2, 3, 4, 5], 5)
    assert not set(one.pages) & set(two.pages)
    assert pool.lookup([1, 2, 3, 4, 5]) == one.pages[:2]
    pool.check_integrity([one, two])


def test_a_leak_is_found() -> None:
    pool = KvPool.alone(4, 2)
    pool.allocate([1, 2], 2)
    with pytest.raises(CapacityError, match="page 0 is in 0 tables but counted 1"):
        pool.check_integrity([])


# --- forks ---


def test_a_fork_shares_pages_until_one_of_them_writes() -> None:
    copied: list[tuple[int, int]] = []
    pool = KvPool.alone(10, 4, copy_page=lambda source, target: copied.append((source, target)))
    parent = pool.allocate(list(range(6)), 6)
    fork = pool.fork(parent, 6)
    assert fork.pages == parent.pages
    pool.append(fork, 7, 6)
    assert fork.pages[0] == parent.pages[0]
    assert copied == [(parent.pages[1], fork.pages[1])]
    pool.append(parent, 7, 6)  # alone with its last page by now
    assert len(copied) == 1
    pool.check_integrity([parent, fork])


def test_a_fork_at_a_page_border_copies_nothing() -> None:
    copied: list[tuple[int, int]] = []
    pool = KvPool.alone(10, 4, copy_page=lambda source, target: copied.append((source, target)))
    parent = pool.allocate(list(range(8)), 12)
    fork = pool.fork(parent, 8)
    pool.append(fork, 9, 8)
    assert (len(fork.pages), copied) == (3, [])
    assert fork.pages[2] != parent.pages[2]


def test_a_known_page_is_never_written_by_the_fork_that_shares_it() -> None:
    pool = KvPool.alone(10, 4)
    parent = pool.allocate(list(range(6)), 8)
    fork = pool.fork(parent, 6)
    pool.seal(parent, list(range(8)), 8)
    known = parent.pages[1]
    pool.free(parent)
    pool.append(fork, 7, 6)
    assert fork.pages[1] != known
    assert pool.lookup([*range(8), 9])[1] == known


def test_a_fork_without_room_for_its_copy_changes_nothing() -> None:
    pool = KvPool.alone(2, 4)
    parent = pool.allocate(list(range(6)), 6)
    fork = pool.fork(parent, 6)
    assert not pool.can_append(fork, 7, 6)
    with pytest.raises(CapacityError, match="no room for 7 tokens"):
        pool.append(fork, 7, 6)
    assert fork.pages == parent.pages
    pool.check_integrity([parent, fork])


# --- slabs ---


@pytest.mark.parametrize(("page_bytes", "slab_bytes"), [((6, 4), 48), ((7, 5), 70), ((32, 16, 8), 256), ((97, 89), 776)])
@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_levels_of_unlike_pages_share_slabs_under_random_operations(
        page_bytes: tuple[int, ...], slab_bytes: int, page_size: int) -> None:
    rng = random.Random(page_size)
    slabs = SlabPool(12, slab_bytes)
    levels = []
    for i, size in enumerate(page_bytes):
        memory = Bytes(page_size << i)
        levels.append(Level(rng, KvPool(slabs, page_size << i, size, copy_page=memory.copy), memory))
    for step in range(6_000):
        level = levels[(step // 500 + (rng.random() < 0.2)) % len(levels)]  # one after the other has the most to do
        level.act()
        if step % 50 == 0:
            for level in levels:
                level.check()
            spans = sorted((p * level.pool.page_bytes, (p + 1) * level.pool.page_bytes)
                           for level in levels for pages in level.pool.slabs.values() for p in pages)
            assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False)), "pages of two levels overlap"
            assert spans[-1][1] <= slabs.num_slabs * slabs.slab_bytes
    for level in levels:
        level.end()
    for level in levels:
        level.check()
        least = min(len(slabs.pages(slab, level.pool.page_bytes)) for slab in range(slabs.num_slabs))
        assert level.pool.num_available >= (slabs.num_slabs - len(levels) + 1) * least


def test_a_level_that_needs_room_gets_the_others_spare_slabs() -> None:
    slabs = SlabPool(4, 24)
    target, draft = KvPool(slabs, 4, 6), KvPool(slabs, 4, 4)
    table = target.allocate([0] * 64, 64)  # all 16 pages
    assert not draft.can_allocate([1], 1)
    target.free(table)
    assert draft.can_allocate([1] * 96, 96)
    other = draft.allocate([1] * 96, 96)  # all 24
    assert (len(target.slabs), len(draft.slabs)) == (0, 4)
    target.check_integrity([])
    draft.check_integrity([other])


def test_owned_pages_move_together_when_a_slab_is_asked_for() -> None:
    moves: list[tuple[int, int]] = []
    slabs = SlabPool(4, 24)
    target = KvPool(slabs, 4, 6, copy_page=lambda source, target: moves.append((source, target)), reuse=False)
    draft = KvPool(slabs, 4, 4)
    tables = [target.allocate([0], 4) for _ in range(16)]
    for i, table in enumerate(tables):
        if i % 4:
            target.free(table)  # one page of each slab is left
    left = tables[::4]
    draft.allocate([1] * 72, 72)  # three slabs
    assert len(target.slabs) == 1
    assert len(moves) == 3
    assert len({page for table in left for page in table.pages}) == 4
    target.check_integrity(left)


def test_a_moved_page_is_still_known_by_its_tokens() -> None:
    slabs = SlabPool(2, 24)
    target, draft = KvPool(slabs, 2, 6), KvPool(slabs, 4, 4)
    first = target.allocate([1, 2], 2)
    rest = target.allocate([0] * 6, 6)
    second = target.allocate([3, 4], 2)
    target.seal(first, [1, 2], 2)
    target.seal(second, [3, 4], 2)
    target.free(rest)
    draft.allocate([1], 4)
    assert len(target.slabs) == 1
    assert target.lookup([1, 2, 9]) == first.pages
    assert target.lookup([3, 4, 9]) == second.pages
    target.check_integrity([first, second])


def test_slab_waste_is_at_most_one_slab_a_level() -> None:
    rng = random.Random(0)
    slabs = SlabPool(16, 24)
    levels = [KvPool(slabs, 4, 6, reuse=False), KvPool(slabs, 4, 4, reuse=False)]
    live: list[list[PageTable]] = [[], []]
    for step in range(4000):
        i = step // 100 % 2
        if levels[i].can_allocate([0], 4) and rng.random() < 0.7:
            live[i].append(levels[i].allocate([0], 4))
        elif live[i]:
            levels[i].free(live[i].pop(rng.randrange(len(live[i]))))
    while levels[0].can_allocate([0], 4):  # asked for all it has, the other keeps what its pages fill
        live[0].append(levels[0].allocate([0], 4))
    assert len(levels[1].slabs) <= -(-len(live[1]) // 6)
    for level, tables in zip(levels, live, strict=True):
        level.check_integrity(tables)


def test_slab_sizes() -> None:
    assert slab_bytes_for([100], 1050) == 1000  # alone: the whole pool
    assert slab_bytes_for([6, 4], 10_000) == 192  # a common multiple: no waste
    assert slab_bytes_for([1009, 1013], 1 << 20) == 32 * 1013


def test_a_slab_that_holds_no_page_is_refused() -> None:
    with pytest.raises(CapacityError, match="expected room for a page of 25"):
        KvPool(SlabPool(4, 24), 4, 25)
