"""Law L1 on the real model, compiled for this machine: sampled text and log probabilities whatever is drafted, batched or cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from tests.function_level import steady

CHATS = [[{"role": "user", "content": text}] for text in (
    "Repeat this line four times: the quick brown fox jumps over the lazy dog.", "Write two sentences about rain.", "Count from 1 to 20.")]
PARAMS = {
    "hot": SamplingParams(temperature=1.0, seed=3, max_tokens=32),
    "filtered": SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.05, presence_penalty=0.1,
                               min_tokens=20, seed=4, max_tokens=32),
    "penalised": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.2, max_tokens=32),
}
OFF = Speculation(enabled=False)


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    with Engine.load(smollm2, threads=2) as engine:
        yield steady(engine)


def without(params: SamplingParams, **changes: object) -> SamplingParams:
    return SamplingParams(**{**vars(params), "speculation": OFF, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PARAMS)
def test_speculation_batch_and_threads_leave_the_text(smollm2: Path, engine: Engine, name: str) -> None:
    drafted = [engine.generate([chat], PARAMS[name])[0] for chat in CHATS]
    batch = engine.generate(CHATS, PARAMS[name])
    with Engine.load(smollm2, threads=1, num_pages=9) as small:  # waits and preempts
        plain = small.generate(CHATS, without(PARAMS[name]))
    assert [r.token_ids for r in drafted] == [r.token_ids for r in batch] == [r.token_ids for r in plain]
    assert sum(r.statistics.drafted for r in drafted) > 0


def test_log_probabilities_are_those_of_a_teacher_forced_pass_bit_for_bit(engine: Engine) -> None:
    """A12, and law L2: the same rows once as drafted ones, once as a prompt's."""
    (result,) = engine.generate([CHATS[0]], SamplingParams(temperature=0.5, seed=1, logprobs=5, max_tokens=40))
    whole = [*result.prompt_token_ids, *result.token_ids]
    (forced,) = engine.generate([whole], SamplingParams(prompt_logprobs=5, max_tokens=1))
    assert result.logprobs is not None
    assert forced.prompt_logprobs is not None
    assert forced.prompt_logprobs[len(result.prompt_token_ids) - 1 :] == result.logprobs
    assert result.statistics.accepted > 0


def test_choices_of_n_differ_and_come_again(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=9, n=3, max_tokens=16)
    (first,), (second,) = engine.generate([CHATS[1]], params), engine.generate([CHATS[1]], without(params))
    texts = [first.token_ids, *(other.token_ids for other in first.others)]
    assert texts == [second.token_ids, *(other.token_ids for other in second.others)]
    assert len(set(map(tuple, texts))) == 3
    engine.check_integrity()
