"""Laws L1, L2 and L3 on SmolLM2's artifact: a slice of what the tiny model is tested for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from mlsdc.runtime.step import Array
from mlsdc.runtime.tree import Tree
from tests.laws.proposers import Known
from tests.laws.rows import Item, Steps, committed, engine_over, poison

pytestmark = pytest.mark.model

OFF = Speculation(enabled=False)
OUTPUT = 24
PROMPTS = ("The capital of France is", "1, 2, 3, 4, 5, 6,", "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n", "x")
TREE = Tree((11, 12, 13, 14, 15, 16, 17), (-1, 0, 0, 1, -1, 4, 4))
DEPTHS = (300, 270, 255, 64)  # contexts the trees stand on: on both sides of a block and of a span


@pytest.fixture(scope="module", params=[1, 2], ids="{} threads".format)
def engine(smollm2: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(smollm2, threads=request.param, num_pages=60) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    texts = [engine.tokenize(prompt) for prompt in PROMPTS]
    return [*texts, (texts[2] * 10)[:150]]


@pytest.fixture(scope="module")
def plain(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[Array]]:
    outputs, data = [], []
    for prompt in prompts:
        made = engine_over(engine)
        request = made.submit(list(prompt), params(OFF))
        last = np.empty((0, 0), np.uint8)
        while made.step():
            if not request.finished:
                last = committed(made, request)
        outputs.append(request.output)
        data.append(last)
    return outputs, data


def params(speculation: Speculation | None) -> SamplingParams:
    return SamplingParams(max_tokens=OUTPUT, ignore_eos=True, speculation=speculation)


@pytest.mark.parametrize("name", ["perfect", "trees", "twins", "hostile"])
def test_ids_and_bytes_are_the_targets_in_a_ragged_batch(
        engine: Engine, prompts: list[list[int]], plain: tuple[list[list[int]], list[Array]], name: str) -> None:
    """In a pool of 14 pages: requests wait, and are preempted."""
    outputs, data = plain
    known = Known([p + o for p, o in zip(prompts, outputs, strict=True)], engine.manifest.model.vocab_size)
    made = engine_over(engine, known.level(name), num_pages=14)
    requests = [made.submit(list(prompt), params(Speculation(max_draft_tokens=7))) for prompt in prompts]
    while made.step():
        poison(made, made.pool.free_pages())
        for request, wanted in zip(requests, data, strict=True):
            if not request.finished and request.num_computed:
                length = min(request.num_computed, len(wanted))
                assert np.array_equal(committed(made, request)[:length], wanted[:length])
    assert [request.output for request in requests] == outputs
    made.check_integrity()


def test_chunks_trees_and_neighbours_change_no_bit(engine: Engine) -> None:
    """A text in chunks of 64, 1 and 7, then trees on it: every node's logits are its path's, decoded row by row."""
    steps = Steps(engine)
    rng = np.random.default_rng(0)
    text = tuple(int(t) for t in rng.integers(0, 49152, max(DEPTHS) + 1))
    at, other, third = steps.pages(320), steps.pages(320), steps.pages(320)
    logits = steps.chunks(at, text, [64])
    assert steps.chunks(other, text[:90], [1, 7, 2, 8, 3, 9, 5]).tobytes() == logits[:90].tobytes()
    assert np.array_equal(steps.bytes_of(at, 90), steps.bytes_of(other, 90))
    for start in DEPTHS:
        neighbour = Item(third, 0, text[:9])
        found, beside = steps.run([Item(at, start, (text[start],), TREE), neighbour])
        assert found[0].tobytes() == logits[start].tobytes()
        assert beside.tobytes() == logits[:9].tobytes()
    start, path = DEPTHS[0], (0, 1, 3)
    found, _ = steps.run([Item(at, start, (text[start],), TREE), Item(third, 0, text[:9])])
    steps.commit(at, start, [0, *(node + 1 for node in path)])
    chained = steps.bytes_of(at, start + 4)
    tokens = (*text[: start + 1], *(TREE.tokens[node] for node in path))
    decoded = steps.chunks(at, tokens, [1], start=start)
    assert decoded.tobytes() == found[[0, *(node + 1 for node in path)]].tobytes()
    assert np.array_equal(steps.bytes_of(at, start + 4), chained)
