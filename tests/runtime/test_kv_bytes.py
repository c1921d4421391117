"""Law L3 on the fake device: what lies in a page depends on the tokens and positions only."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fake_device import POISON, VOCAB, make_engine
from proposers import LEVELS, random_trees

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.request import Request
from mlsdc.runtime.sampling_params import SamplingParams


def committed_bytes(engine: Engine, request: Request) -> list[list[int]]:
    """(token, position) of every committed slot, read through the page table."""
    size = engine.pool.page_size
    slots = [request.table.pages[p // size] * size + p % size for p in range(request.num_computed)]
    return engine._memory.slots[slots].tolist()  # type: ignore[attr-defined, no-any-return]


def poison_free_pages(engine: Engine) -> None:
    size = engine.pool.page_size
    for page in engine.pool.free_pages():
        engine._memory.write_page(page, np.full((size, 2), POISON, np.int32))


@pytest.mark.parametrize("name", LEVELS)
def test_committed_bytes_are_those_of_a_run_that_never_drafted(name: str) -> None:
    rng = random.Random(5)
    engine = make_engine(LEVELS[name](), num_pages=45)
    requests = [
        engine.submit([rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))], SamplingParams(max_tokens=40)) for _ in range(8)
    ]
    while engine.step():
        poison_free_pages(engine)
        for request in requests:
            expected = [[token, position] for position, token in enumerate(request.tokens[: request.num_computed])]
            assert request.finished or committed_bytes(engine, request) == expected


def test_scratch_pages_are_never_in_a_page_table() -> None:
    engine = make_engine(random_trees(0), num_pages=45)
    requests = [engine.submit([i, i + 1], SamplingParams(max_tokens=60)) for i in range(8)]
    while engine.step():
        pages = [page for r in requests for page in r.table.pages]
        scratch = [page for r in requests for page in r.table.scratch]
        assert len(set(scratch)) == len(scratch)
        assert not set(scratch) & set(pages)


def test_plain_decoding_runs_the_forward_program_only() -> None:
    engine = make_engine(None)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20))
    assert engine._commit.runs == 0  # type: ignore[attr-defined]
    assert engine._forward.runs == 20  # type: ignore[attr-defined]


def test_a_request_without_speculation_owns_no_scratch_pages() -> None:
    engine = make_engine(None)
    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=20))
    engine.step()
    assert request.table.pages
    assert not request.table.scratch
