"""Levels that are decoders, alone and one above the other: the text is the target's, and what they guess is what their model says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.levels.compose import stack
from mlsdc.runtime.levels.decoder import ModelLevel, ModelState, SelfLevel
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from tests.function_level import sends_all
from tests.heads.tiny import SMALL_CONTEXT

OFF = Speculation(enabled=False)
PROMPTS = [[(7 * i * j + 3) % 256 for i in range(5 + 40 * j)] for j in range(1, 5)]


@contextmanager
def engine_with(artifact: Path, *names: str) -> Iterator[Engine]:
    """The engine, with only these of its levels stacked; all of them if none is named."""
    with Engine.load(artifact, threads=1) as engine:
        levels = [level for level in engine.drafting.levels if level.name in names]
        if levels:
            engine.drafting.level = stack(levels)
        yield sends_all(engine)


@pytest.fixture(scope="module", params=["small", "first", "counts first", "counts small first"])
def engine(request: pytest.FixtureRequest, stacked: Path) -> Iterator[Engine]:
    with engine_with(stacked, *request.param.split()) as loaded:
        yield loaded


def params(temperature: float, speculation: Speculation | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=30, temperature=temperature, seed=3, ignore_eos=True, speculation=speculation)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_same_with_levels_and_without(engine: Engine, temperature: float) -> None:
    drafted = engine.generate(PROMPTS, params(temperature))
    plain = engine.generate(PROMPTS, params(temperature, OFF))
    assert sum(result.statistics.drafted for result in drafted) > 100
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    engine.check_integrity()


def test_a_smaller_model_proposes_its_own_likeliest_text(stacked: Path, small_model: Path) -> None:
    """Its greedy text by transformers is a path of the tree."""
    import torch
    import transformers

    torch.set_num_threads(1)
    reference = transformers.AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    with engine_with(stacked, "small") as engine:
        level = engine.drafting.level
        assert isinstance(level, ModelLevel)
        agreed = 0
        for prompt in PROMPTS[:3]:
            state = level.start()
            state.observe(prompt[:60])
            tree = level.propose_all([state], [12])[0]
            with torch.no_grad():
                wanted = int(reference(torch.tensor([prompt[:60]])).logits[0, -1, :256].argmax())
            agreed += wanted == tree.tokens[0]
            state.release()
        assert agreed >= 2  # int8 weights


def test_a_context_longer_than_the_models_begins_anew_and_is_counted(stacked: Path) -> None:
    with engine_with(stacked, "small") as engine:
        level = engine.drafting.level
        assert isinstance(level, ModelLevel)
        assert level.context == SMALL_CONTEXT
        (result,) = engine.generate([[i % 256 for i in range(3 * SMALL_CONTEXT)]], SamplingParams(max_tokens=90, ignore_eos=True))
        assert result.statistics.drafted > 100
        assert level.counters["restarts"] >= 1


def test_a_level_above_keeps_only_what_it_would_say(stacked: Path) -> None:
    from mlsdc.runtime.tree import chain

    with engine_with(stacked, "small") as engine:
        level = engine.drafting.level
        assert isinstance(level, ModelLevel)
        state = level.start()
        state.observe(PROMPTS[0])
        alone = level.propose_all([state], [12])[0]
        likely = next(i for i, parent in enumerate(alone.parents) if parent == -1)
        never = next(token for token in range(256) if token not in alone.tokens)
        above = level.propose_above([state], [12], [chain([alone.tokens[likely], never])])[0]
        assert alone.tokens[likely] in above.tokens
        assert never not in above.tokens
        state.release()


def test_first_layers_read_the_targets_pages_and_own_none(stacked: Path) -> None:
    with engine_with(stacked, "first") as engine:
        level = engine.drafting.level
        assert isinstance(level, SelfLevel)
        info = next(info for info in engine.manifest.levels if info.name == "first")
        assert info.kv == engine.manifest.target_level.kv
        assert info.params["kv_of"] == "target"
        assert any(name.startswith("w.layers.0") for name in info.params["shared"])
        engine.generate(PROMPTS, params(0.0))


def test_a_state_rolls_back(stacked: Path) -> None:
    with engine_with(stacked, "small") as engine:
        level = engine.drafting.level
        assert isinstance(level, ModelLevel)
        state = level.start()
        assert isinstance(state, ModelState)
        state.observe(PROMPTS[1])
        first = level.propose_all([state], [8])[0]
        state.observe([1, 2, 3])
        level.propose_all([state], [8])
        state.rollback(3)
        assert level.propose_all([state], [8])[0] == first
        state.release()


def test_a_level_that_cannot_verify_the_one_below_is_refused(stacked: Path) -> None:
    with Engine.load(stacked, threads=1) as engine:
        counts = next(level for level in engine.drafting.levels if level.kind == "ngram")
        with pytest.raises(ArtifactError, match="level 'counts': a 'ngram' level cannot verify the level below it"):
            stack([counts, counts])
