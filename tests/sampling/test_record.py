"""Records in the step buffers: kept up to date wherever a sequence stands, whatever stood there before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from native import LIMITS, STOPS

from mlsdc.runtime.sampling.record import NUM_SEEN, RecordWriter, Sampler
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.step import Header, StepBuffers
from mlsdc.runtime.tree import EMPTY

PARAMS = [SamplingParams(temperature=1.0), SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5), SamplingParams(),
          SamplingParams(presence_penalty=0.5, temperature=0.5, logit_bias={3: 1.0}), SamplingParams(min_tokens=4)]


def request(params: SamplingParams, seed: int) -> Any:
    tokens = [1, 2, 3]
    return SimpleNamespace(params=params, tokens=tokens, sampler=Sampler(params, seed, 3, STOPS), wants_prompt_logprobs=False)


@given(st.lists(st.permutations(range(5)).flatmap(lambda p: st.integers(1, 5).map(lambda n: p[:n])), max_size=12), st.integers(0, 99))
def test_records_are_those_of_a_fresh_write(steps: list[list[int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests = [request(params, i) for i, params in enumerate(PARAMS)]
    buffers = StepBuffers(LIMITS, 16)
    writer = RecordWriter(buffers)
    for order in steps:
        items = [SimpleNamespace(request=requests[i], out=seq, outs=1, tree=EMPTY) for seq, i in enumerate(order)]
        buffers.header[Header.OUT] = len(items)
        ran = writer.write(items)  # type: ignore[arg-type]
        assert ran == any(requests[i].sampler.active(len(requests[i].tokens)) for i in order)
        for seq, i in enumerate(order):
            own = requests[i]
            if ran and own.sampler.active(len(own.tokens)):
                fresh = StepBuffers(LIMITS, 16)
                Sampler(own.params, i, 3, STOPS).write(fresh, seq, own.tokens)
                seen = int(fresh.sampling[seq].view(np.int32)[NUM_SEEN])
                assert buffers.sampling[seq].tobytes() == fresh.sampling[seq].tobytes()
                assert buffers.seen_ids[seq, :seen].tolist() == fresh.seen_ids[seq, :seen].tolist()
                assert buffers.seen_counts[seq, :seen].tolist() == fresh.seen_counts[seq, :seen].tolist()
            elif ran:
                assert not buffers.sampling[seq].any()
            own.tokens += rng.integers(0, 20, rng.integers(1, 4)).tolist()
