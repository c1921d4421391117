"""Law L3 end to end: with every kind of cache format a text does not depend on drafts, neighbours, preemption or reused prefixes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from mlsdc.runtime.slabs import SlabPool, slab_bytes_for
from tests.function_level import FunctionLevel, sends_all
from tests.laws.formats import FORMATS, tiny_of
from tests.laws.proposers import Known
from tests.laws.tiny import VOCAB

TEXT = [(i * 7 + i // 5) % 250 + 1 for i in range(400)]
PROMPTS = [TEXT[:3], TEXT[:37], TEXT[:70], TEXT[50:170], TEXT[:150], [5, 6, 7] * 30]


@pytest.fixture(scope="session", params=FORMATS)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_of(tmp_path_factory, request.param)


def over(engine: Engine, level: FunctionLevel, sequences: float) -> Engine:
    """Another engine with an empty pool for so many long sequences over the same device and weights, which drafts what the level says."""
    geometry = engine.manifest.target_level.kv
    assert geometry is not None
    pages, wide = 14 * geometry.page_bytes, 4 * (geometry.wide or geometry).page_bytes
    num_bytes = int(sequences * (pages + wide))
    slab = slab_bytes_for([kind.page_bytes for kind in (geometry, geometry.wide) if kind is not None], num_bytes)
    slabs = SlabPool(num_bytes // slab, slab)
    return sends_all(Engine(engine.manifest, engine.device, engine._memory, [level], tokenizer=engine.tokenizer, slabs=slabs))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_are_those_of_solo_runs_that_never_drafted(artifact: Path, temperature: float) -> None:
    params = [SamplingParams(max_tokens=60, temperature=temperature, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    off = [SamplingParams(max_tokens=60, temperature=temperature, seed=i, ignore_eos=True, speculation=Speculation(enabled=False))
           for i in range(len(PROMPTS))]
    with Engine.load(artifact, threads=2) as engine:
        alone = [engine.generate([prompt], one)[0].token_ids for prompt, one in zip(PROMPTS, off, strict=True)]
        known = Known([[*prompt, *text] for prompt, text in zip(PROMPTS, alone, strict=True)], VOCAB)
        preempted = 0
        for name, sequences in (("trees", 8), ("half", 2.0)):
            drafting = over(engine, known.level(name), sequences)
            for _ in range(2):  # the second time prefixes are known
                found = drafting.generate(list(PROMPTS), params)
                drafting.check_integrity()
                assert [result.token_ids for result in found] == alone
            assert drafting.statistics.accepted > 100
            preempted += drafting.statistics.preemptions
        assert preempted
