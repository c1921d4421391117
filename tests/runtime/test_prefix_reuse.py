"""A known prefix is reused just as well with drafts as without (FIELD A20), whatever drafts, and its text is the same."""

from __future__ import annotations

import pytest
from fake_device import VOCAB, continuation, make_engine
from proposers import LEVELS

from mlsdc.runtime.sampling_params import SamplingParams

PROMPT = [i * i % VOCAB for i in range(40)]  # ten pages of four


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_a_prompt_of_ten_pages_is_reused_but_for_its_last_token(level: str | None) -> None:
    engine = make_engine(LEVELS[level]() if level else None, page_size=4)
    params = SamplingParams(max_tokens=12)
    results = [engine.generate([[*PROMPT, 1]], params)[0] for _ in range(2)]
    assert [r.token_ids for r in results] == [continuation([*PROMPT, 1], 12)] * 2
    assert [r.statistics.cached_tokens for r in results] == [0, 40]


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_an_answer_is_reused_to_its_last_full_page(level: str | None) -> None:
    engine = make_engine(LEVELS[level]() if level else None, page_size=4)
    (first,) = engine.generate([PROMPT], SamplingParams(max_tokens=21))
    (second,) = engine.generate([[*PROMPT, *first.token_ids, 2]], SamplingParams(max_tokens=5))
    assert second.statistics.cached_tokens == 60


def test_an_aborted_prompt_leaves_the_pages_it_computed() -> None:
    engine = make_engine(page_size=4, max_num_batched_tokens=16, max_logit_rows=16)
    request = engine.submit(PROMPT, SamplingParams(max_tokens=5))
    engine.step()
    engine.abort(request)
    (result,) = engine.generate([PROMPT], SamplingParams(max_tokens=5))
    assert result.statistics.cached_tokens == 16
    assert result.token_ids == continuation(PROMPT, 5)
