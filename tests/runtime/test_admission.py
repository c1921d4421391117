"""Everything a request could break is refused before anything runs (law L7), with the engine and its neighbours as they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from fake_device import VOCAB, continuation, make_engine
from hypothesis import given
from hypothesis import strategies as st
from proposers import random_trees

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.sampling_params import SamplingParams, Speculation

BAD: dict[str, Callable[[Engine], Any]] = {
    "token id too large": lambda e: e.generate([[1, VOCAB]]),
    "token id negative": lambda e: e.generate([[-1]]),
    "token id beyond 64 bits": lambda e: e.generate([[1 << 80]]),
    "token id not a number": lambda e: e.generate([[math.nan]]),
    "no token": lambda e: e.generate([[]]),
    "prompt fills the context": lambda e: e.generate([[1] * 96]),
    "temperature nan": lambda e: e.generate([[1]], SamplingParams(temperature=math.nan)),
    "temperature negative": lambda e: e.generate([[1]], SamplingParams(temperature=-1.0)),
    "temperature infinite": lambda e: e.generate([[1]], SamplingParams(temperature=math.inf)),
    "top_p nan": lambda e: e.generate([[1]], SamplingParams(top_p=math.nan)),
    "top_p negative": lambda e: e.generate([[1]], SamplingParams(top_p=-0.5)),
    "min_p huge": lambda e: e.generate([[1]], SamplingParams(min_p=1e300)),
    "top_k negative": lambda e: e.generate([[1]], SamplingParams(top_k=-7)),
    "penalty huge": lambda e: e.generate([[1]], SamplingParams(presence_penalty=1e30)),
    "penalty nan": lambda e: e.generate([[1]], SamplingParams(frequency_penalty=math.nan)),
    "bias nan": lambda e: e.generate([[1]], SamplingParams(logit_bias={1: math.nan})),
    "max_tokens past the context": lambda e: e.generate([[1]], SamplingParams(max_tokens=96)),
    "max_tokens huge": lambda e: e.generate([[1]], SamplingParams(max_tokens=1 << 80)),
    "max_tokens zero": lambda e: e.generate([[1]], SamplingParams(max_tokens=0)),
    "min_tokens past the context": lambda e: e.generate([[1]], SamplingParams(min_tokens=96)),
    "stop of a wrong type": lambda e: e.generate([[1]], SamplingParams(stop=3)),  # type: ignore[arg-type]
    "stop of wrong members": lambda e: e.generate([[1]], SamplingParams(stop=(b"x",))),  # type: ignore[arg-type]
    "stop empty": lambda e: e.generate([[1]], SamplingParams(stop=("",))),
    "stop id out of range": lambda e: e.generate([[1]], SamplingParams(stop_token_ids=(VOCAB,))),
    "seed beyond 64 bits": lambda e: e.generate([[1]], SamplingParams(seed=1 << 64)),
    "n huge": lambda e: e.generate([[1]], SamplingParams(n=1 << 40)),
    "drafts beyond the artifact's": lambda e: e.generate([[1]], SamplingParams(speculation=Speculation(max_draft_tokens=64))),
    "bias out of range": lambda e: e.generate([[1]], SamplingParams(logit_bias={VOCAB: 1.0})),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_request_error_and_its_neighbour_goes_on(case: str) -> None:
    engine = make_engine(random_trees(0))
    neighbour = engine.submit([5, 6], SamplingParams(max_tokens=30))
    engine.step()
    queued, available = len(engine._inbox), engine.pool.num_available
    with pytest.raises(RequestError) as error:
        BAD[case](engine)
    assert "\n" not in str(error.value)
    assert (len(engine._inbox), engine.pool.num_available) == (queued, available), "nothing was queued, nothing allocated"
    assert engine.wait(neighbour).token_ids == continuation([5, 6], 30)
    engine.check_integrity()
    assert engine.pool.num_available == engine.pool.num_pages


def test_no_max_tokens_means_the_rest_of_the_context() -> None:
    (result,) = make_engine().generate([[1, 2, 3]], SamplingParams(max_tokens=None))
    assert result.token_ids == continuation([1, 2, 3], 93)
    assert result.finish_reason == "length"


def test_the_largest_seed_is_taken() -> None:
    assert SamplingParams(seed=(1 << 64) - 1).seed == (1 << 64) - 1


def test_a_text_that_is_not_unicode_is_refused() -> None:
    tokenizer = byte_tokenizer()
    engine = make_engine(vocab=tokenizer.tokenizer.get_vocab_size(), tokenizer=tokenizer)
    for prompt in ("a\ud800b", [{"role": "user", "content": "\udfff"}]):
        with pytest.raises(RequestError, match="prompt"):
            engine.generate(prompt)


@given(st.dictionaries(
    st.sampled_from(sorted(set(SamplingParams.__dataclass_fields__) - {"speculation"})),
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=3),
              st.dictionaries(st.integers(), st.floats(), max_size=2)),
    max_size=3))
def test_any_parameters_are_served_or_refused_and_never_break_the_engine(values: dict[str, Any]) -> None:
    engine = make_engine(random_trees(0), max_num_seqs=2)
    with suppress(RequestError):
        engine.generate([[1, 2]], SamplingParams(**values))
    assert engine.generate([[3]], SamplingParams(max_tokens=3))[0].token_ids == continuation([3], 3)
