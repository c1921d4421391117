"""The launch walker and its pool of threads, with a kernel that counts: every task runs once, and nothing runs after its launch is over."""

from __future__ import annotations

import ctypes
import faulthandler
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlsdc.runtime.device.cpu import INT, LAUNCH_WORDS, POINTER, THREADS, pool_words
from mlsdc.runtime.step import Array, aligned
from mlsdc.targets.cpu_build import compile_walker, link, walker_source
from mlsdc.targets.cpu_isa import ISAS
from tests.once import once

ISA = ISAS["cpu-x86-64-v4"]

# count(lo, hi, counts: i32, open: i32): counts[t] += 1 for every task, atomically; fails where *open is not 1
COUNT = """
define i32 @__tvm_ffi_count(ptr %self, ptr %args, i32 %num_args, ptr %result) nounwind {
entry:
  %lo.slot = getelementptr i8, ptr %args, i64 8
  %lo = load i64, ptr %lo.slot
  %hi.slot = getelementptr i8, ptr %args, i64 24
  %hi = load i64, ptr %hi.slot
  %counts.slot = getelementptr i8, ptr %args, i64 40
  %counts = load ptr, ptr %counts.slot
  %open.slot = getelementptr i8, ptr %args, i64 56
  %open = load ptr, ptr %open.slot
  %is.open = load atomic i32, ptr %open acquire, align 4
  %fine = icmp eq i32 %is.open, 1
  br i1 %fine, label %head, label %refuse
head:
  %t = phi i64 [ %lo, %entry ], [ %next, %body ]
  %more = icmp slt i64 %t, %hi
  br i1 %more, label %body, label %out
body:
  %at = getelementptr i32, ptr %counts, i64 %t
  %was = atomicrmw add ptr %at, i32 1 monotonic
  %next = add i64 %t, 1
  br label %head
out:
  ret i32 0
refuse:
  ret i32 -1
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    def make(folder: Path) -> None:
        source = folder / "walker.ll"
        source.write_text(walker_source(ISA) + COUNT)
        link(ISA, [compile_walker(source, folder / "walker.o")], folder / "walker.so")

    return ctypes.CDLL(str(once(tmp_path_factory, "cpu-walker", make) / "walker.so"))


class Pool:
    """A pool of `threads` over the library; `run` walks a list of (grid, counts)."""

    def __init__(self, library: ctypes.CDLL, threads: int, *, absent: int = 0, generation: int = 0) -> None:
        """`absent` workers never come; the first launch is of `generation` + 1."""
        self.library = library
        self.words = aligned((pool_words(threads),), "i8")
        self.words[THREADS] = threads
        self.words[:1].view(np.uint32)[1] = generation
        self.header = np.zeros(16, np.int32)
        self.workers = [
            threading.Thread(target=self._call, args=("mlsdc_worker", self.words.ctypes.data, i)) for i in range(1, threads - absent)]
        for worker in self.workers:
            worker.start()

    def launches(self, *entries: tuple[int, int, int, Array, Array]) -> tuple[Array, Any]:
        """(grid, header word or -1, grain, counts, open) each; returns the list and what keeps it alive."""
        table, kept = aligned((len(entries), LAUNCH_WORDS), "i8"), list[Any]()
        for row, (grid, word, grain, counts, open_) in zip(table, entries, strict=True):
            args = np.array([(INT, 0), (INT, 0), (POINTER, counts.ctypes.data), (POINTER, open_.ctypes.data)], np.int64)
            kept.append((args, open_))
            kernel = ctypes.cast(self.library["__tvm_ffi_count"], ctypes.c_void_p).value
            row[:6] = kernel, args.ctypes.data, len(args), grid, word, grain
        return table, kept

    def run(self, table: Array) -> int:
        """0, or 1 + the index of the launch that failed."""
        self._call("mlsdc_run", self.words.ctypes.data, table.ctypes.data, len(table), self.header.ctypes.data)
        return int(self.words[19])

    def stop(self) -> None:
        self._call("mlsdc_stop", self.words.ctypes.data)
        for worker in self.workers:
            worker.join()

    def _call(self, name: str, *values: int) -> None:
        args = np.array([(INT, value) for value in values], np.int64)
        result = np.zeros(2, np.int64)
        function = self.library["__tvm_ffi_" + name]
        function(None, ctypes.c_void_p(args.ctypes.data), len(values), ctypes.c_void_p(result.ctypes.data))


@pytest.fixture
def pool(library: ctypes.CDLL) -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def make(threads: int, **how: int) -> Pool:
        pools.append(Pool(library, threads, **how))
        return pools[-1]

    yield make
    for made in pools:
        made.stop()


def ones() -> Array:
    return np.ones(1, np.int32)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("grid", [1, 2, 3, 7, 8, 9, 100, 1003])
@pytest.mark.parametrize("grain", [1, 8])
def test_every_task_runs_once(pool: Callable[..., Pool], threads: int, grid: int, grain: int) -> None:
    crew, counts = pool(threads), np.zeros(grid + 1, np.int32)
    table, _kept = crew.launches((grid, -1, grain, counts, ones()))
    for turn in range(1, 6):
        assert crew.run(table) == 0
        assert counts.tolist() == [turn] * grid + [0]


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_every_task_runs_once_when_short_launches_alternate_with_long_ones(pool: Callable[..., Pool], threads: int) -> None:
    """A thread that has just finished the last chunk of one launch must not claim one of the next before that is open."""
    faulthandler.dump_traceback_later(100, exit=True)  # a chunk counted twice is a launch that never ends
    crew = pool(threads)
    sizes = [2, 40, 3, 17, 2, 40, 5, 40, 2, 9] * 20
    counts = [np.zeros(size + 1, np.int32) for size in sizes]
    table, _kept = crew.launches(*((size, -1, 1, c, ones()) for size, c in zip(sizes, counts, strict=True)))
    turns = 300
    for _ in range(turns):
        assert crew.run(table) == 0
    faulthandler.cancel_dump_traceback_later()
    wrong = {(size, int(c[:size].min()), int(c[:size].max())) for size, c in zip(sizes, counts, strict=True) if (c[:size] != turns).any()}
    assert not wrong


@pytest.mark.parametrize(("threads", "absent"), [(2, 1), (3, 2), (7, 4)])
def test_tasks_of_a_worker_that_does_not_come_are_run_by_the_others(pool: Callable[..., Pool], threads: int, absent: int) -> None:
    crew = pool(threads, absent=absent)
    sizes = [1, 2, 5, 100]
    counts = [np.zeros(size, np.int32) for size in sizes]
    table, _kept = crew.launches(*((size, -1, 1, c, ones()) for size, c in zip(sizes, counts, strict=True)))
    for turn in range(1, 20):
        assert crew.run(table) == 0
        assert all((c == turn).all() for c in counts)


def test_generations_begin_again_after_the_last(pool: Callable[..., Pool]) -> None:
    crew = pool(3, generation=2**32 - 5)
    sizes = [2, 40, 3]
    counts = [np.zeros(size, np.int32) for size in sizes]
    table, _kept = crew.launches(*((size, -1, 1, c, ones()) for size, c in zip(sizes, counts, strict=True)))
    for turn in range(1, 9):
        assert crew.run(table) == 0
        assert all((c == turn).all() for c in counts)
    assert int(crew.words[:1].view(np.uint32)[1]) == 24 - 5


@pytest.mark.parametrize("threads", [1, 3])
def test_a_launchs_grid_follows_the_header(pool: Callable[..., Pool], threads: int) -> None:
    crew, counts = pool(threads), np.zeros(64, np.int32)
    table, _kept = crew.launches((3, 2, 1, counts, ones()))
    for rows in (0, 1, 5, 20):
        counts[:] = 0
        crew.header[2] = rows
        assert crew.run(table) == 0
        assert counts.tolist() == [1] * 3 * rows + [0] * (64 - 3 * rows)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_kernel_that_fails_ends_the_list_and_is_named(pool: Callable[..., Pool], threads: int, bad: int) -> None:
    crew = pool(threads)
    counts = [np.zeros(40, np.int32) for _ in range(3)]
    opens = [ones() for _ in range(3)]
    table, _kept = crew.launches(*((40, -1, 1, c, o) for c, o in zip(counts, opens, strict=True)))
    opens[bad][0] = 0
    assert crew.run(table) == bad + 1
    assert [int(c.sum()) for c in counts] == [40] * bad + [0] * (3 - bad)
    opens[bad][0] = 1
    assert crew.run(table) == 0


def test_workers_that_sleep_wake_for_the_next_list(pool: Callable[..., Pool]) -> None:
    crew, counts = pool(3), np.zeros(40, np.int32)
    table, _kept = crew.launches((40, -1, 1, counts, ones()))
    for turn in range(1, 4):
        while int(crew.words[32:33].view(np.int32)[0]) < 2:  # both asleep
            pass
        assert crew.run(table) == 0
        assert counts.tolist() == [turn] * 40
