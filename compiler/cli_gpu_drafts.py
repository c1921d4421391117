"""Drafts on a card: trees that grow on the GPU, behind the target's step, against those of the same kernels that the host grows in its own
time; and the texts of both, and of none, which law L1 makes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.bench.everything import Everything
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.levels.base import Level, LevelState
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from mlsdc.runtime.tree import Tree

TOKENS = 24  # of each text
PROMPT = 24
MOST_TIPPED = 0.1  # of the trees may differ: the device's logarithm and the host's round otherwise, and near ties tip

Key = tuple[int, bool]  # of a tree: how many tokens were committed before it, and whether its request draws
Drafted = dict[Key, tuple[tuple[int, ...], tuple[int, ...]]]  # tokens and parents


@dataclass(frozen=True)
class Drafts:
    """Of one level with programs: `same` of `trees` are those that the host grows. `texts`: they are the same with drafts of both kinds and
    without any."""

    level: str
    trees: int
    same: int
    texts: bool
    why: str = ""  # what the device said, where it broke off

    @property
    def passed(self) -> bool:
        return self.texts and self.trees > 0 and self.same >= (1 - MOST_TIPPED) * self.trees


def check_drafts(path: Path, device: str, tokens: int = TOKENS) -> list[Drafts]:
    """Each of the artifact's levels with programs, alone. Raises ArtifactError, DeviceError."""
    names = [info.name for info in Artifact.open(path).manifest.levels[:-1] if info.programs]
    if not names:
        return []
    with Engine.load(path, device=device) as engine:
        engine.drafting.controller = Everything()
        return [check_level(engine, level, tokens) for level in engine.drafting.levels if level.name in names]


def check_level(engine: Engine, level: Level, tokens: int) -> Drafts:
    """Nothing is the same on a device that chooses what is no token."""
    engine.drafting.level = level
    try:
        return compared(engine, level, tokens)
    except DeviceError as error:
        return Drafts(level.name, 0, 0, texts=False, why=str(error))


def compared(engine: Engine, level: Level, tokens: int) -> Drafts:
    plain, _ = said(engine, level, tokens, speculation=Speculation(enabled=False))
    ahead, there = said(engine, level, tokens)
    with on_the_host(level):
        texts, here = said(engine, level, tokens)
    both = there.keys() & here.keys()
    return Drafts(level.name, len(both), sum(there[key] == here[key] for key in both), plain == ahead == texts)


def said(engine: Engine, level: Level, tokens: int, speculation: Speculation | None = None) -> tuple[list[list[int]], Drafted]:
    """Two requests, one of which draws: their texts, and every tree that the level proposed for them."""
    drafted: Drafted = {}
    own = level.propose_all

    def kept(states: Sequence[LevelState], budgets: Sequence[int]) -> list[Tree]:
        trees = own(states, budgets)
        for state, tree in zip(states, trees, strict=True):
            committed = len(getattr(state, "tokens", ())) or getattr(state, "computed", 0)
            drafted[committed, state.drawn is not None] = tree.tokens, tree.parents
        return trees

    random = np.random.default_rng(3)
    prompts = [random.integers(1, engine.manifest.model.vocab_size, PROMPT).tolist() for _ in range(2)]
    greedy = SamplingParams(max_tokens=tokens, ignore_eos=True, speculation=speculation)
    level.propose_all = kept  # type: ignore[method-assign]
    try:
        results = engine.generate(prompts, [greedy, replace(greedy, temperature=0.8, seed=5)])
    finally:
        level.propose_all = own  # type: ignore[method-assign]
    return [list(result.token_ids) for result in results], drafted


@contextmanager
def on_the_host(level: Level) -> Iterator[None]:
    """The level's trees grow on the host, after its step."""
    lists = {name: getattr(level, name) for name in ("trees", "behind") if hasattr(level, name)}
    for name in lists:
        setattr(level, name, None)
    try:
        yield
    finally:
        for name, value in lists.items():
            setattr(level, name, value)
