"""The order of service: priority, then arrival; nobody waits for ever behind equals, and a preempted request loses no token."""

from __future__ import annotations

from typing import Any

import pytest
from fake_device import VOCAB, continuation, make_engine
from proposers import random_trees

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.request import Request
from mlsdc.runtime.sampling_params import SamplingParams


def few(count: int = 10) -> SamplingParams:
    return SamplingParams(max_tokens=count)


def order_of_ends(engine: Engine, requests: list[Request]) -> list[int]:
    order: list[int] = []
    while engine.step():
        order += [i for i, request in enumerate(requests) if request.finished and i not in order]
    return order


def test_a_lower_priority_number_is_served_first() -> None:
    engine = make_engine(max_num_seqs=1)
    requests = [engine.submit([i], few(), priority=priority) for i, priority in enumerate((2, 0, 1, 0, -1))]
    assert order_of_ends(engine, requests) == [4, 1, 3, 2, 0]


def test_an_urgent_request_takes_the_place_of_the_last_in_line() -> None:
    engine = make_engine(random_trees(0), max_num_seqs=2)
    slow = [engine.submit([i], few(40)) for i in range(2)]
    engine.step()
    urgent = engine.submit([7, 8], few(5), priority=-1)
    engine.step()
    assert urgent in engine.scheduler.running
    assert slow[1] in engine.scheduler.waiting
    for request, prompt in ((urgent, [7, 8]), (slow[0], [0]), (slow[1], [1])):
        assert engine.wait(request).token_ids == continuation(prompt, len(request.output))
    assert [request.statistics.preemptions for request in (*slow, urgent)] == [0, 1, 0]


def test_equals_are_never_preempted_for_one_another() -> None:
    engine = make_engine(max_num_seqs=2)
    requests = [engine.submit([i], few(20)) for i in range(5)]
    while engine.step():
        pass
    assert [request.statistics.preemptions for request in requests] == [0] * 5


def test_where_pages_are_short_the_least_urgent_gives_way() -> None:
    engine = make_engine(num_pages=12, page_size=4, max_num_seqs=4)
    late = engine.submit([1, 2, 3], few(40), priority=5)
    engine.step()
    early = engine.submit([4, 5, 6], few(40), priority=0)
    assert order_of_ends(engine, [late, early]) == [1, 0]
    assert early.statistics.preemptions == 0
    assert late.output == continuation([1, 2, 3], 40)


def test_a_large_request_is_not_passed_by_small_ones_for_ever() -> None:
    engine = make_engine(num_pages=24, page_size=4, max_num_seqs=8)
    requests = [engine.submit([i % VOCAB], few(30)) for i in range(3)]
    large = engine.submit([i % VOCAB for i in range(80)], few(5))
    small = [engine.submit([i % VOCAB], few(5)) for i in range(10)]
    order = order_of_ends(engine, [*requests, large, *small])
    assert order.index(3) < min(order.index(4 + i) for i in range(10))


@pytest.mark.parametrize("priority", [None, 1.5, "1", True])
def test_a_priority_that_is_no_integer_is_refused(priority: Any) -> None:
    with pytest.raises(RequestError, match="priority"):
        make_engine().submit([1], priority=priority)
