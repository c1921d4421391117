"""What a step's choices are taken for."""

from __future__ import annotations

import pytest
from fake_device import VOCAB, make_engine

from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.sampling_params import SamplingParams


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_a_device_that_chooses_what_is_no_token_ends_the_requests_with_one_line(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    engine = make_engine()
    run = engine._forward.run

    def nonsense() -> None:
        run()
        engine._memory.buffers.choices[:] = wrong

    monkeypatch.setattr(engine._forward, "run", nonsense)
    with pytest.raises(DeviceError, match=f"the device chose token {wrong}, the vocabulary has {VOCAB}"):
        engine.generate([1, 2, 3], SamplingParams(max_tokens=4))
