"""The page pool: integrity under any operations, reuse of exactly equal prefixes, nothing changed by a refusal."""

from __future__ import annotations

import random

import pytest

from mlsdc.runtime.errors import CapacityError
from mlsdc.runtime.kv_pool import KvPool, PageTable


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_integrity_holds_under_25k_random_operations(page_size: int) -> None:
    rng = random.Random(page_size)
    pool = KvPool(40, page_size)
    live: list[tuple[PageTable, list[int]]] = []
    for step in range(25_000):
        roll = rng.random()
        if roll < 0.3:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 6 * page_size))]
            scratch = rng.randint(0, 3)
            room = len(tokens) + rng.randint(0, page_size)
            if pool.can_allocate(tokens, room, scratch):
                live.append((pool.allocate(tokens, room, scratch), tokens))
            else:
                with pytest.raises(CapacityError):
                    pool.allocate(tokens, room, scratch)
        elif live and roll < 0.6:
            table, tokens = rng.choice(live)
            tokens += [rng.randrange(2) for _ in range(rng.randint(1, page_size))]
            if pool.can_append(table, len(tokens)):
                pool.append(table, len(tokens))
            else:
                del tokens[len(table.pages) * page_size :]
        elif live and roll < 0.8:
            table, tokens = rng.choice(live)
            pool.seal(table, tokens, rng.randint(0, len(tokens)))
        elif live:
            table, _ = live.pop(rng.randrange(len(live)))
            pool.free(table)
        if step % 50 == 0:
            pool.check_integrity([table for table, _ in live])
    for table, _ in live:
        pool.free(table)
    pool.check_integrity([])
    assert pool.num_available == pool.num_pages


def test_a_known_prefix_is_reused_page_by_page() -> None:
    pool = KvPool(10, 4)
    first = pool.allocate(list(range(10)), 10)
    pool.seal(first, list(range(10)), 10)
    second = pool.allocate([*range(8), 99, 98], 10)
    assert second.num_cached == 8
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]


def test_a_prefix_stays_known_after_its_owner_is_gone() -> None:
    pool = KvPool(10, 4)
    table = pool.allocate(list(range(10)), 10)
    pool.seal(table, list(range(10)), 10)
    pages = list(table.pages)
    pool.free(table)
    assert pool.lookup(list(range(10))) == pages[:2]


def test_the_last_token_is_always_left_to_compute() -> None:
    pool = KvPool(10, 4)
    table = pool.allocate(list(range(8)), 8)
    pool.seal(table, list(range(8)), 8)
    assert len(pool.lookup(list(range(8)))) == 1


def test_equal_tokens_after_different_beginnings_are_not_shared() -> None:
    pool = KvPool(10, 4)
    table = pool.allocate([1, 1, 1, 1, 7, 7, 7, 7, 5], 9)
    pool.seal(table, [1, 1, 1, 1, 7, 7, 7, 7, 5], 8)
    assert pool.lookup([2, 2, 2, 2, 7, 7, 7, 7, 5]) == []
    assert pool.lookup([7, 7, 7, 7, 5]) == []


def test_hash_collisions_cannot_share_a_page() -> None:
    class Same(int):
        def __hash__(self) -> int:
            return 1

    pool = KvPool(10, 2)
    table = pool.allocate([Same(1), Same(2), Same(3)], 3)
    pool.seal(table, [Same(1), Same(2), Same(3)], 3)
    assert pool.lookup([Same(2), Same(1), Same(3)]) == []
    assert len(pool.lookup([Same(1), Same(2), Same(3)])) == 1


def test_cached_pages_give_way_the_end_of_the_oldest_chain_first() -> None:
    pool = KvPool(4, 2)
    table = pool.allocate([1, 2, 3, 4, 5, 6, 7, 8], 8)
    pool.seal(table, [1, 2, 3, 4, 5, 6, 7, 8], 8)
    pool.free(table)
    pool.allocate([9], 1)
    assert len(pool.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 3


def test_two_sequences_that_computed_the_same_page_keep_their_own() -> None:
    pool = KvPool(10, 2)
    one, two = pool.allocate([1, 2, 3, 4, 5], 5), pool.allocate([1, 2, 3, 4, 5], 5)
    pool.seal(one, [1, 2, 3, 4, 5], 5)
    pool.seal(two, [1, 2, 3, 4, 5], 5)
    assert not set(one.pages) & set(two.pages)
    assert pool.lookup([1, 2, 3, 4, 5]) == one.pages[:2]
    pool.check_integrity([one, two])


def test_a_leak_is_found() -> None:
    pool = KvPool(4, 2)
    pool.allocate([1, 2], 2)
    with pytest.raises(CapacityError, match="page 0 is in 0 tables but counted 1"):
        pool.check_integrity([])
