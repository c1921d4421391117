"""`speculation.levels` names some of an artifact's levels: only those draft for that request, and the text is the same (law L1)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fake_device import VOCAB, FakeDevice, FakeMemory, continuation, make_manifest
from proposers import FunctionLevel

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.levels.base import Level, LevelState, Verifier
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from mlsdc.runtime.step import Limits
from mlsdc.runtime.tree import Tree
from tests.function_level import Propose, sends_all

NAMES = ("low", "mid", "high")
MERGED = {"merge_nodes": 8, "verified_by": "target"}


def oracle(index: int, length: int) -> Propose:
    """At most `length` right tokens, as level `index`'s."""
    def propose(history: list[int], budget: int) -> Tree:
        tokens = continuation(history, min(budget, length))
        return Tree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), (-0.1 * (index + 1),) * len(tokens), (index,) * len(tokens))

    return propose


class Above(FunctionLevel, Verifier):
    """Puts its own tree in the place of the one below."""

    def propose_above(self, states: Sequence[LevelState], budgets: Sequence[int], below: Sequence[Tree]) -> list[Tree]:
        return self.propose_all(states, budgets)


def engine_of(levels: Sequence[Level], params: Sequence[dict[str, object]]) -> Engine:
    limits = Limits(96, 8, 40, 40, 16)
    infos = [LevelInfo(level.name, level.kind, dict(given)) for level, given in zip(levels, params, strict=True)]
    manifest = make_manifest(limits, levels=infos)
    return sends_all(Engine(manifest, FakeDevice(), FakeMemory(limits, 4, 300, VOCAB), levels))


ENGINES = {
    "merge": (FunctionLevel, [MERGED, MERGED, MERGED]),
    "stack": (Above, [{}, {}, {}]),
    "stack on a merge": (Above, [{"merge_nodes": 8, "verified_by": "high"}, {"merge_nodes": 8, "verified_by": "high"}, {}]),
}


@pytest.mark.parametrize("how", ENGINES)
def test_only_the_named_levels_draft_beside_requests_that_name_others(how: str) -> None:
    kind, given = ENGINES[how]
    choices: list[tuple[str, ...] | None] = [("low",), ("mid",), ("high",), ("low", "mid"), (), None]
    prompts = [[5 + i, 9, 3] for i in range(len(choices))]
    params = [SamplingParams(max_tokens=30, speculation=Speculation(levels=names)) for names in choices]
    with engine_of([kind(oracle(i, 3 + i), name) for i, name in enumerate(NAMES)], given) as engine:
        results = engine.generate(prompts, params)
        engine.check_integrity()
    for prompt, names, result in zip(prompts, choices, results, strict=True):
        assert result.token_ids == continuation(prompt, 30)
        drafted = {name for name, level in result.statistics.levels.items() if level.drafted}
        assert drafted <= set(NAMES if names is None else names)
        assert bool(drafted) == (names != ())


def test_a_silent_level_is_not_run() -> None:
    asked: list[str] = []

    def level(index: int) -> FunctionLevel:
        def propose(history: list[int], budget: int) -> Tree:
            asked.append(NAMES[index])
            return oracle(index, 3)(history, budget)

        return FunctionLevel(propose, NAMES[index])

    with engine_of([level(0), level(1)], [MERGED, MERGED]) as engine:
        engine.generate([[5, 9, 3], [7, 7, 7]], SamplingParams(max_tokens=12, speculation=Speculation(levels=("mid",))))
    assert set(asked) == {"mid"}
