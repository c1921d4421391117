"""Cascades made of an artifact's levels, so that a benchmark can compare several of them in one run: `counts`, `counts+eagle>first`."""

from __future__ import annotations

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import ArtifactError, MlsdcError
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.levels.compose import MergedLevel, stack


def cascade_of(engine: Engine, text: str, max_nodes: int, option: str) -> Level:
    """`a+b` merges the trees of levels a and b, at most `max_nodes` nodes; `a>b` lets b judge and extend what a proposes.

    Raises MlsdcError, which names `option`.
    """
    levels = {level.name: level for level in engine.drafting.levels}
    stages: list[Level] = []
    for part in text.split(">"):
        names = part.split("+")
        for name in names:
            if name not in levels:
                raise MlsdcError(f"{option}: '{name}' is not a level of the artifact; levels are {', '.join(levels)}")
        stages.append(levels[names[0]] if len(names) == 1 else MergedLevel([levels[name] for name in names], max_nodes))
    try:
        return stack(stages)
    except ArtifactError as error:
        raise MlsdcError(f"{option}: '{text}': {str(error).removesuffix('; compile again')}") from None
