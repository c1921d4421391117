"""Sampling parameters: every field is checked, and nothing that cannot be served is ignored."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.sampling_params import SamplingParams, Speculation

BAD: list[tuple[str, Any]] = [
    ("temperature", math.nan), ("temperature", -0.1), ("temperature", math.inf), ("temperature", "1"), ("temperature", True),
    ("temperature", 10**400), ("temperature", 101.0), ("top_k", 1 << 31), ("repetition_penalty", 101.0), ("logprobs", 21),
    ("prompt_logprobs", 21), ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ("top_p", 0.0), ("top_p", 1.01), ("top_p", math.nan), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0.0), ("repetition_penalty", math.nan),
    ("logit_bias", [1]), ("logit_bias", {1: math.nan}), ("logit_bias", {1: 101.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {"a": 1.0}),
    ("seed", 1 << 64), ("seed", -(1 << 63) - 1), ("seed", 1.0), ("n", 0), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.0),
    ("max_tokens", True), ("min_tokens", -1), ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 1), ("stop", ["a"] * 65),
    ("stop", "a" * 4097), ("stop_token_ids", 1), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("ignore_eos", 1),
    ("skip_special_tokens", None), ("logprobs", -1), ("prompt_logprobs", 1.5), ("speculation", {"enabled": True}),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_and_named(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [
    ("enabled", 1), ("max_draft_tokens", -1), ("max_draft_tokens", True), ("levels", [1]), ("levels", 3),
])
def test_a_bad_speculation_value_is_refused_and_named(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"speculation\.{name}"):
        Speculation(**{name: value})


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens: 5, expected at most max_tokens, which is 4"):
        SamplingParams(max_tokens=4, min_tokens=5)
