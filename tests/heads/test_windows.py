"""Drafting levels and targets that keep a window and sinks of their cache: pages go back, and the text is what its definition says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.compiler import compile_model
from mlsdc.compiler.errors import ConfigError
from mlsdc.runtime.bench.quality import kv_name
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.levels.compose import stack
from mlsdc.runtime.levels.decoder import ModelLevel, ModelState
from mlsdc.runtime.memory_plan import plan_artifact
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from tests.function_level import sends_all
from tests.heads.tiny import with_heads
from tests.once import once

OFF = Speculation(enabled=False)
LONG = [(7 * i * i + 3 * i) % 256 for i in range(300)]
PROMPTS = [LONG, LONG[:90], LONG[50:240], [5, 6, 7]]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The target drafts for itself: once with a window of its cache, once with all of it, quantised in groups."""

    def make(folder: Path) -> None:
        shared = {"kind": "model", "model": str(tiny_model), "max_nodes": 8, "depth": 4}
        cascade = [{**shared, "name": "windowed", "kv": {"dtype": "bf16", "page_size": 16, "window": 64, "sinks": 4}},
                   {**shared, "name": "whole", "kv": {"dtype": "int4", "page_size": 16}}]
        compile_model({**with_heads(tiny_model), "cascade": cascade}, folder / "windows.mlsdc")

    return once(tmp_path_factory, "heads-windows", make) / "windows.mlsdc"


@pytest.fixture(scope="module")
def evicting(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    def make(folder: Path) -> None:
        config = with_heads(tiny_model, {"kind": "ngram", "name": "counts", "max_nodes": 8, "min_probability": 0.01})
        config["target"] |= {"kv": {"dtype": "int8", "page_size": 16, "eviction": {"kind": "window", "budget": 132, "sinks": 8}}}
        compile_model(config, folder / "evicting.mlsdc")

    return once(tmp_path_factory, "heads-evicting", make) / "evicting.mlsdc"


def params(max_tokens: int, speculation: Speculation | None = None, temperature: float = 0.0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1, temperature=temperature, speculation=speculation)


def only(engine: Engine, name: str) -> ModelLevel:
    (level,) = (level for level in engine.drafting.levels if level.name == name)
    engine.drafting.level = stack([level])
    assert isinstance(level, ModelLevel)
    return level


def test_a_window_gives_pages_back_and_guesses_on(artifact: Path) -> None:
    """A text that fits into the window is guessed as without one. (A model of random weights looks everywhere: a long one is not.)"""
    found: dict[str, list[float]] = {}
    for name in ("windowed", "whole"):
        with Engine.load(artifact, threads=1) as engine:
            level = only(engine, name)
            requests = [sends_all(engine).submit(prompt, params(count)) for prompt, count in ((LONG, 60), ([5, 6, 7], 55))]
            while engine.step():
                engine.check_integrity()
            found[name] = [request.statistics.acceptance_length for request in requests]
            assert not any(level.pool._owners)
    assert found["whole"][0] > 1.8
    assert found["windowed"][0] > 1.05
    assert found["windowed"][1] == pytest.approx(found["whole"][1], rel=0.05)


def test_a_level_holds_its_sinks_and_its_window(artifact: Path) -> None:
    with Engine.load(artifact, threads=1) as engine:
        level = only(engine, "windowed")
        assert level.pool.window is not None
        state = level.start()
        assert isinstance(state, ModelState)
        state.observe(LONG)
        first = level.propose_all([state], [8])[0]
        level.pool.check_integrity([state.table])
        assert len(first)
        assert len(state.table.owned) <= 1 + 64 // 16 + 2 < len(LONG) // 16
        for count in (1, 30, 3):
            state.observe(LONG[:count])
            level.propose_all([state], [8])
            level.pool.check_integrity([state.table])
            assert len(state.table.owned) <= 1 + 64 // 16 + 2 + count // 16 + 1
        state.rollback(34)  # beyond what is kept: it begins anew, and says the same
        assert level.propose_all([state], [8])[0] == first
        level.pool.check_integrity([state.table])
        state.release()
        assert not any(level.pool._owners)


def test_what_a_level_guesses_does_not_depend_on_how_it_was_fed(artifact: Path) -> None:
    with Engine.load(artifact, threads=1) as engine:
        level = only(engine, "windowed")
        at_once, bit_by_bit = level.start(), level.start()
        at_once.observe(LONG)
        for start in range(0, len(LONG), 23):
            bit_by_bit.observe(LONG[start : start + 23])
            level.propose_all([bit_by_bit], [4])
        assert level.propose_all([at_once], [8]) == level.propose_all([bit_by_bit], [8])


@pytest.mark.parametrize("name", ["windowed", "whole"])
def test_the_text_is_the_targets(artifact: Path, name: str) -> None:
    with Engine.load(artifact, threads=1) as engine:
        plain = engine.generate(PROMPTS, params(40, OFF, 0.7))
        only(engine, name)
        drafted = sends_all(engine).generate(PROMPTS, params(40, None, 0.7))
        assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
        assert engine.statistics.drafted > 100
        engine.check_integrity()


def test_a_target_that_forgets_holds_its_budget_and_its_text_is_one(evicting: Path) -> None:
    """In any company, with drafts or without, preempted or not, a text is the solo run's."""
    with Engine.load(evicting, threads=1) as engine:
        assert kv_name(engine.manifest) == "int8 of 8 + 124 tokens"
        solo = [engine.generate([prompt], params(60, OFF))[0].token_ids for prompt in PROMPTS]
        requests = [sends_all(engine).submit(prompt, params(60)) for prompt in PROMPTS]
        while engine.step():
            engine.check_integrity()
            for request in requests:
                if request.decoding and not request.finished:
                    assert len(request.table.owned) <= 1 + -(-124 // 16) + 3
        assert [request.output for request in requests] == solo
        again = engine.generate([LONG], params(60))[0]
        assert again.token_ids == solo[0]
        assert again.statistics.cached_tokens > 0  # pages that were given back are found again, while nobody wants their room
    with Engine.load(evicting, threads=1, num_pages=18) as engine:
        assert [result.token_ids for result in sends_all(engine).generate(PROMPTS, params(60))] == solo
        assert engine.statistics.preemptions > 0
        engine.check_integrity()


def test_a_plan_counts_what_a_window_keeps(evicting: Path) -> None:
    from mlsdc.runtime.artifact import Artifact

    artifact = Artifact.open(evicting)
    plan = plan_artifact(artifact, artifact.manifest.targets[0])
    assert plan.levels[-1].pages(400, drafts=False)[0][1] < 400 // 16
    assert plan.users(400) > plan.pool_bytes // (plan.levels[-1].kv.page_bytes * 26)  # type: ignore[union-attr]


@pytest.mark.parametrize(("eviction", "message"), [
    ({"kind": "h2o", "budget": 512},
     "kind: h2o needs every page's share of the attention, which no kernel reports; expected window, found 'h2o'"),
    ({"kind": "window", "budget": 10}, "budget: 10 is out of range; 128 to 1048576 is allowed"),
    ({"kind": "window", "budget": 512, "sinks": 0}, "sinks: 0 is out of range; 1 to 64 is allowed"),
])  # fmt: skip
def test_an_eviction_that_cannot_be_is_refused(tiny_model: Path, tmp_path: Path, eviction: dict[str, object], message: str) -> None:
    config = with_heads(tiny_model)
    config["target"] |= {"kv": {"eviction": eviction}}
    with pytest.raises(ConfigError) as caught:
        compile_model(config, tmp_path / "x.mlsdc")
    assert str(caught.value) == f"config: target.kv.eviction.{message}"
