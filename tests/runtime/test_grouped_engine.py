"""Law L3 with a grouped cache format, above the kernels: rejections, forks, preemptions and reused prefixes leave no trace."""

from __future__ import annotations

import random

import pytest
from fake_device import VOCAB, continuation
from fake_grouped import committed, make_grouped, poison
from hypothesis import given, settings
from hypothesis import strategies as st
from proposers import LEVELS, random_trees

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.kv_tail import Tail
from mlsdc.runtime.request import Request
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from mlsdc.runtime.tree import Tree

TAILS = [Tail(8, 8, 8), Tail(8, 16, 8), Tail(4, 4, 2), Tail(8, 16, 4)]


def run(engine: Engine, requests: list[Request]) -> None:
    """To the end; after every step pages are counted, free ones spoilt, and committed bytes those of a run that never drafted."""
    while engine.step():
        engine.check_integrity()
        poison(engine)
        for choice in (choice for request in requests for choice in request.choices):
            if not choice.finished and choice.table.pages:
                expected = [(token, position) for position, token in enumerate(choice.tokens[: choice.num_computed])]
                assert committed(engine, choice.table.pages, choice.table.tail, choice.num_computed) == expected


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", LEVELS)
def test_text_and_bytes_are_those_of_a_run_that_never_drafted(name: str, tail: Tail) -> None:
    rng = random.Random(7)
    engine = make_grouped(LEVELS[name](), tail=tail, slabs=110)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(10)]
    requests = [engine.submit(prompt, SamplingParams(max_tokens=40)) for prompt in prompts]
    run(engine, requests)
    assert [request.output for request in requests] == [continuation(prompt, 40) for prompt in prompts]


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from(TAILS), st.integers(40, 70), st.sampled_from([5, 9, 17, 40]))
def test_any_mix_of_forks_drafts_and_preemptions_equals_solo_runs(seed: int, tail: Tail, slabs: int, batched: int) -> None:
    rng = random.Random(seed)
    engine = make_grouped(random_trees(seed), tail=tail, slabs=slabs, max_num_batched_tokens=batched, max_num_seqs=min(6, batched),
                          max_tree_nodes=min(16, batched - 1))
    shared = [rng.randrange(VOCAB) for _ in range(30)]
    requests, expected = [], []
    for _ in range(12):
        prompt = shared[: rng.randint(0, 30)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        count = rng.randint(1, 40)
        params = SamplingParams(max_tokens=count, n=rng.randint(1, 3), speculation=Speculation(enabled=rng.random() < 0.7))
        requests.append(engine.submit(prompt, params))
        expected.append(continuation(prompt, count))
    run(engine, requests)
    for request, text in zip(requests, expected, strict=True):
        assert all(choice.output == text for choice in request.choices)


def test_such_a_mix_preempts_forks_and_reuses() -> None:
    engine = make_grouped(random_trees(0), slabs=12)
    shared = [i * i % VOCAB for i in range(40)]
    requests = [engine.submit([*shared[: 20 * (i % 3)], *range(i, i + 4)], SamplingParams(max_tokens=50, n=2)) for i in range(8)]
    run(engine, requests)
    statistics = [choice.statistics for request in requests for choice in request.choices]
    assert sum(s.preemptions for s in statistics) > 0
    assert sum(s.cached_tokens for s in statistics) > 0
    assert sum(s.accepted for s in statistics) > 0


@pytest.mark.parametrize("tail", TAILS)
def test_a_known_prompt_is_reused_up_to_its_last_page_boundary(tail: Tail) -> None:
    engine = make_grouped(None, tail=tail, slabs=110)
    prompt = [i * i % VOCAB for i in range(45)]
    (first,) = engine.generate([prompt], SamplingParams(max_tokens=5))
    (again,) = engine.generate([[*prompt, 3]], SamplingParams(max_tokens=5))
    assert again.statistics.cached_tokens == 45 // tail.group * tail.group
    assert again.token_ids == continuation([*prompt, 3], 5)
    (turn,) = engine.generate([[*prompt, *first.token_ids, 1, 2]], SamplingParams(max_tokens=5))
    assert turn.statistics.cached_tokens >= 45 // tail.group * tail.group


def test_a_path_is_never_deeper_than_r() -> None:
    engine = make_grouped(LEVELS["oracle"](), tail=Tail(4, 4, 4), drafts=16)
    (result,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=40))
    assert result.token_ids == continuation([1, 2, 3], 40)
    assert 4 < result.statistics.acceptance_length <= 5


@given(st.lists(st.integers(-1, 30), max_size=30), st.integers(0, 6))
def test_a_cut_tree_keeps_its_shallow_nodes(raw: list[int], depth: int) -> None:
    parents = tuple(min(parent, i - 1) for i, parent in enumerate(raw))
    tree = Tree(tuple(range(len(raw))), parents, (0.5,) * len(raw))
    cut = tree.cut(depth)
    assert list(cut.tokens) == [i for i, at in enumerate(tree.depths()) if at <= depth]
    assert cut.depths() == [at for at in tree.depths() if at <= depth]
    assert len(cut.logq) == len(cut)


def test_a_request_that_could_never_fit_is_refused() -> None:
    engine = make_grouped(None, slabs=2, slab_bytes=45)
    with pytest.raises(RequestError, match="larger pool"):
        engine.submit([1] * 40, SamplingParams(max_tokens=50))
    assert engine.generate([[1, 2]], SamplingParams(max_tokens=5))[0].token_ids == continuation([1, 2], 5)


def test_nothing_is_lost_when_all_requests_are_gone() -> None:
    engine = make_grouped(random_trees(1), slabs=50)
    engine.generate([[i, 2, 3] for i in range(12)], SamplingParams(max_tokens=60))
    engine.check_integrity()
    assert engine.pool.wide is not None
    assert not any(engine.pool._owners)
    assert not any(engine.pool.wide._owners)
