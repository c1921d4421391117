"""Counts on the device through a whole engine, kernels executed by Triton's interpreter: trees are the host level's, texts the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.levels.base import LevelState
from mlsdc.runtime.levels.ngram import NgramLevel
from mlsdc.runtime.levels.ngram_ahead import AheadNgramLevel, AheadNgramState
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.tree import Tree
from tests.function_level import sends_all

PROMPTS = [[1, 2, 3, 4] * 3 + [1, 2], [65] * 6]
PARAMS = [SamplingParams(max_tokens=5, ignore_eos=True), SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.8, seed=3)]


def test_trees_are_the_hosts_and_texts_the_cpus(tiny_gpu: Path, tiny_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = 0

    def compared(self: AheadNgramLevel, states: Sequence[LevelState], budgets: Sequence[int]) -> list[Tree]:
        nonlocal trees
        found = propose_all(self, states, budgets)
        for state, budget, tree in zip(states, budgets, found, strict=True):
            assert isinstance(state, AheadNgramState)
            host = plain.start()
            host.observe(state.history)
            if state.drawn is not None:
                host.couple(state.drawn)
            expected = host.propose(budget)
            assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
            trees += 1
        return found

    propose_all = AheadNgramLevel.propose_all
    monkeypatch.setattr(AheadNgramLevel, "propose_all", compared)
    with sends_all(Engine.load(tiny_gpu, num_pages=40, device="interpret")) as engine:
        plain = NgramLevel(engine.manifest.levels[0])
        found = engine.generate(PROMPTS, PARAMS)
    with Engine.load(tiny_cpu, num_pages=40, threads=1) as engine:
        assert [result.token_ids for result in found] == [result.token_ids for result in engine.generate(PROMPTS, PARAMS)]
    assert trees >= 4
