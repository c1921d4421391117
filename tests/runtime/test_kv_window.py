"""Windows with sinks: what a row reads stays, what nobody reads is given back, and a sequence holds the same pages however long it is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kv_pool import Bytes

from mlsdc.runtime.errors import ArtifactError, CapacityError
from mlsdc.runtime.kv_pool import KvPool, PageTable
from mlsdc.runtime.kv_window import KvWindow, narrower, window_of
from mlsdc.runtime.slabs import SlabPool

WINDOWS = st.builds(KvWindow, st.integers(64, 200), st.integers(1, 40))


def pool_of(window: KvWindow, num_pages: int, page_size: int, memory: Bytes, *, reuse: bool = True, most_rows: int = 50) -> KvPool:
    return KvPool(SlabPool(1, num_pages), page_size, 1, copy_page=memory.copy, reuse=reuse, window=window, most_rows=most_rows)


def check_read(window: KvWindow, memory: Bytes, table: PageTable, tokens: list[int], query: int) -> None:
    """A row at `query` finds what was written at every position before it that it sees."""
    found = memory.read(table, query) if query else []
    for j in (*range(min(window.sinks, query)), *range(max(0, query - window.window + 1), query)):
        assert found[j] == tokens[j], j


@settings(max_examples=60, deadline=None)
@given(WINDOWS, st.sampled_from([16, 32, 64]), st.integers(0, 2**32))
def test_rows_find_what_they_read_and_pages_are_counted(window: KvWindow, page_size: int, seed: int) -> None:
    rng = random.Random(seed)
    memory = Bytes(page_size)
    pool = pool_of(window, 60, page_size, memory, reuse=rng.random() < 0.5)
    live: list[tuple[PageTable, list[int], int]] = []  # tables, their tokens, how many are written
    for _ in range(80):
        roll = rng.random()
        if roll < 0.2 or not live:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 600))]
            if pool.can_allocate(tokens, len(tokens)):
                table = pool.allocate(tokens, len(tokens))
                live.append((table, tokens, table.num_cached))
        elif roll < 0.3:
            pool.free(live.pop(rng.randrange(len(live)))[0])
        elif roll < 0.4:
            table, tokens, written = rng.choice(live)
            if written == len(tokens) and pool.can_fork(table, written, written):  # forks wait until their prompt is computed
                live.append((pool.fork(table, written), tokens[:written], written))
        else:
            i = rng.randrange(len(live))
            table, tokens, written = live[i]
            check_read(window, memory, table, tokens, written)
            if written < len(tokens):  # a chunk of the prompt: there are pages, whatever others hold
                count = min(rng.randint(1, 50), len(tokens) - written)
                pool.prepare(table, written, written + count)
            else:
                tokens.append(rng.randrange(2))
                count = 1
                if not pool.can_append(table, len(tokens), written):
                    tokens.pop()
                    continue
                pool.append(table, len(tokens), written)
            memory.write(table, tokens, written, written + count)
            live[i] = table, tokens, written + count
            pool.seal(table, tokens, written + count)
        pool.check_integrity([table for table, _, _ in live])
    for table, _, _ in live:
        pool.free(table)
    pool.check_integrity([])
    assert not any(pool._owners)


@given(WINDOWS, st.sampled_from([16, 32, 64]), st.integers(1, 300))
def test_a_sequence_never_holds_more_than_the_plan_says(window: KvWindow, page_size: int, chunk: int) -> None:
    memory = Bytes(page_size)
    most = window.most_pages(10**9, chunk, page_size)
    pool = pool_of(window, most, page_size, memory, reuse=False, most_rows=chunk)  # and not a page more
    length = 5000
    assert pool.can_ever_hold(length, 0)
    table = pool.allocate([1] * length, length)
    for start in range(0, length, chunk):
        pool.prepare(table, start, min(length, start + chunk))
        assert len(table.owned) <= most
        assert len(table.pages) * page_size >= min(length, start + chunk)
        pool.check_integrity([table])
    pool.append(table, length + 1, length)
    kept = -(-window.sinks // page_size) + -(-window.window // page_size) + 2
    pool.trim(table, length + 1)
    assert len(table.owned) <= kept


def test_a_drafting_levels_pages_slide_without_asking_the_pool() -> None:
    window, memory = KvWindow(64, 4), Bytes(16)
    pool = pool_of(window, 16, 16, memory, reuse=False, most_rows=32)
    table, held = pool.hold(PageTable(), 1000, 2)
    assert held
    assert len(table.owned) == window.most_pages(1000, 32, 16)
    others = [pool.allocate((), 16) for _ in range(pool.num_available)]
    for start in range(0, 1000, 32):
        pool.slide(table, start, min(1000, start + 32))
        pool.check_integrity([table, *others])
    assert table.gap_start == 1
    assert table.gap_end == (992 - 63) // 16


@given(WINDOWS, st.sampled_from([16, 32, 64]), st.integers(1, 100), st.integers(0, 40), st.integers(0, 300))
def test_a_sequence_that_the_pool_can_hold_begins_however_much_of_it_is_known(
        window: KvWindow, page_size: int, chunk: int, spare: int, more: int) -> None:
    memory = Bytes(page_size)
    pool = pool_of(window, window.most_pages(10**9, chunk, page_size) + spare, page_size, memory, most_rows=chunk)
    tokens = list(range(pool.num_pages * page_size + more))
    for length in (len(tokens) - more, len(tokens)):  # the second finds what the first left
        assert pool.can_ever_hold(length, 0)
        table = pool.allocate(tokens[:length], length)
        for start in range(table.num_cached, length, chunk):
            end = min(length, start + chunk)
            pool.prepare(table, start, end)
            check_read(window, memory, table, tokens, start)
            memory.write(table, tokens, start, end)
            pool.seal(table, tokens, end)
        check_read(window, memory, table, tokens, length)
        pool.check_integrity([table])
        pool.free(table)


def test_what_left_the_window_is_not_reached_again() -> None:
    pool = pool_of(KvWindow(64, 4), 40, 16, Bytes(16))
    table = pool.allocate([1] * 300, 300)
    pool.prepare(table, 0, 300)
    pool.append(table, 301, 300)
    assert pool.reaches(table, 300)
    assert not pool.reaches(table, 200)
    assert not pool.can_fork(table, 200, 300)


def test_a_named_page_of_the_gap_is_found_out() -> None:
    pool = pool_of(KvWindow(64, 4), 40, 16, Bytes(16))
    table = pool.allocate([1] * 300, 300)
    pool.prepare(table, 0, 300)
    pool.append(table, 301, 300)
    pool.check_integrity([table])
    table.pages[3] = table.pages[-1]
    with pytest.raises(CapacityError, match="pages 1 to 13 of a table were given back and are named"):
        pool.check_integrity([table])


def test_a_models_own_narrower_window_keeps_its_meaning() -> None:
    assert narrower(0, 0, KvWindow(512, 4)) == (512, 4)
    assert narrower(128, 0, KvWindow(512, 4)) == (128, 0)
    assert narrower(4096, 0, KvWindow(512, 4)) == (512, 4)
    assert narrower(100, 0, None) == (100, 0)


@pytest.mark.parametrize("raw", [{"window": 3, "sinks": 4}, {"window": 512, "sinks": 0}, {"window": "x", "sinks": 1}, [512, 4], {}])
def test_a_window_that_no_compile_writes_is_refused(raw: object) -> None:
    with pytest.raises(ArtifactError, match="kv_window: .* expected a window of at least 64 positions and a sink; compile again"):
        window_of({"kv_window": raw})
