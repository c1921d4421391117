"""Laws L1 and L3 at temperature 0 on compiled artifacts: whoever proposes, the text and the committed bytes are the target's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from mlsdc.runtime.step import Array
from tests.laws.proposers import PROPOSERS, Known
from tests.laws.rows import committed, engine_over, poison
from tests.laws.tiny import TREE_NODES, VOCAB

OFF = Speculation(enabled=False)
OUTPUT = 40
rng = np.random.default_rng(1)
PROMPTS = [[int(t) for t in rng.integers(1, VOCAB, n)] for n in (1, 7, 16, 33, 90, 230)]


@dataclass(frozen=True)
class Plain:
    """What the target says alone and undrafted, and the bytes it leaves."""

    outputs: list[list[int]]
    bytes: list[Array]
    known: Known


def run_alone(engine: Engine, prompt: Sequence[int]) -> tuple[list[int], Array]:
    """Output ids, and the committed bytes of every position but the last."""
    made = engine_over(engine)
    request = made.submit(list(prompt), params(OFF))
    data = np.empty((0, 0), np.uint8)
    while made.step():
        if not request.finished:
            data = committed(made, request)
    return request.output, data


def params(speculation: Speculation | None, max_tokens: int = OUTPUT) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, speculation=speculation)


def drafts(count: int) -> Speculation:
    return Speculation(max_draft_tokens=count)


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Plain:
    with Engine.load(tiny, threads=1, num_pages=200) as engine:
        outputs, data = zip(*(run_alone(engine, prompt) for prompt in PROMPTS), strict=True)
    return Plain(list(outputs), list(data), Known([p + o for p, o in zip(PROMPTS, outputs, strict=True)], VOCAB))


def level_of(name: str, engine: Engine, plain: Plain) -> Level | None:
    return engine.drafting.levels[0] if name == "lookup" else plain.known.level(name)  # lookup: the artifact's own


def test_the_texts_differ_and_wander(plain: Plain) -> None:
    assert len({tuple(output) for output in plain.outputs}) == len(PROMPTS)
    assert all(len(set(output)) > OUTPUT // 3 for output in plain.outputs)


@pytest.mark.parametrize("name", [*PROPOSERS, "lookup"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, TREE_NODES])
def test_ids_are_the_targets_for_every_proposer_and_k_in_a_ragged_batch(tiny_engine: Engine, plain: Plain, name: str, count: int) -> None:
    """Six prompts of 1 to 230 tokens in steps of 56 rows: prompts are cut, and prefill beside drafts."""
    engine = engine_over(tiny_engine, level_of(name, tiny_engine, plain))
    results = engine.generate(PROMPTS, params(drafts(count)))
    assert [r.token_ids for r in results] == plain.outputs
    accepted = sum(r.statistics.accepted for r in results)
    assert accepted > 0 if name in ("perfect", "half", "trees") else accepted >= 0
    engine.check_integrity()


@pytest.mark.parametrize("name", PROPOSERS)
def test_ids_are_the_targets_when_a_request_is_alone(tiny_engine: Engine, plain: Plain, name: str) -> None:
    for prompt, output in zip(PROMPTS, plain.outputs, strict=True):
        (result,) = engine_over(tiny_engine, plain.known.level(name)).generate([prompt], params(drafts(7)))
        assert result.token_ids == output


def test_a_perfect_proposer_needs_a_step_for_each_nine_tokens(tiny_engine: Engine, plain: Plain) -> None:
    (result,) = engine_over(tiny_engine, plain.known.level("perfect")).generate([PROMPTS[2]], params(drafts(8)))
    assert result.token_ids == plain.outputs[2]
    assert result.statistics.steps == -(-(OUTPUT - 1) // 9)
    assert result.statistics.acceptance_rate == 1.0


@settings(max_examples=25)
@given(name=st.sampled_from(PROPOSERS), spare=st.integers(0, 12), seed=st.integers(0, 2**32))
def test_ids_survive_preemption_arrival_and_mixed_settings(tiny_engine: Engine, plain: Plain, name: str, spare: int, seed: int) -> None:
    """A pool of a few pages more than one request needs; requests come while others run."""
    rng = random.Random(seed)
    least = 17 + 1  # 269 positions and a slab
    engine = engine_over(tiny_engine, plain.known.level(name), num_pages=least + spare)
    waiting = rng.sample(range(len(PROMPTS)), len(PROMPTS))
    running = []
    while engine.step() or waiting:
        while waiting and rng.random() < 0.4:
            i = waiting.pop()
            running.append((i, engine.submit(list(PROMPTS[i]), params(rng.choice([OFF, None, drafts(1), drafts(5), drafts(TREE_NODES)])))))
    for i, request in running:
        assert request.output == plain.outputs[i]
    engine.check_integrity()


def test_such_a_pool_does_preempt(tiny_engine: Engine, plain: Plain) -> None:
    engine = engine_over(tiny_engine, plain.known.level("trees"), num_pages=20)
    results = engine.generate(PROMPTS, params(None))
    assert [r.token_ids for r in results] == plain.outputs
    assert sum(r.statistics.preemptions for r in results) > 0


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("num_pages", [20, 200])
def test_committed_bytes_are_those_of_a_run_that_never_drafted(tiny_engine: Engine, plain: Plain, name: str, num_pages: int) -> None:
    """Law L3, after every step, with all free pages full of NaN."""
    engine = engine_over(tiny_engine, plain.known.level(name), num_pages=num_pages)
    requests = [engine.submit(list(prompt), params(drafts(TREE_NODES))) for prompt in PROMPTS]
    compared = 0
    while engine.step():
        poison(engine, engine.pool.free_pages())
        for request, wanted in zip(requests, plain.bytes, strict=True):
            if not request.finished and request.num_computed:
                length = min(request.num_computed, len(wanted))
                assert np.array_equal(committed(engine, request)[:length], wanted[:length])
                compared += length
    assert compared > 1000
    assert [request.output for request in requests] == plain.outputs


def test_a_reused_prefix_gives_the_same_ids_and_bytes(tiny_engine: Engine, plain: Plain) -> None:
    engine = engine_over(tiny_engine, plain.known.level("trees"))
    for _ in range(2):
        for prompt, output in zip(PROMPTS, plain.outputs, strict=True):
            request = engine.submit(list(prompt), params(drafts(5)))
            while engine.step():
                poison(engine, engine.pool.free_pages())
            assert request.output == output
    assert request.statistics.cached_tokens >= 224  # of the last prompt's 230


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_id(tiny: Path, plain: Plain, threads: int) -> None:
    with Engine.load(tiny, threads=threads, num_pages=200) as engine:
        results = engine_over(engine, plain.known.level("trees")).generate(PROMPTS, params(drafts(7)))
    assert [r.token_ids for r in results] == plain.outputs
