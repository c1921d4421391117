"""The cascade's shape is checked before anything is compiled for it."""

from __future__ import annotations

import pytest

from mlsdc.compiler.cascade import check_cascade, stages, verifiers
from mlsdc.compiler.errors import IrError
from mlsdc.compiler.module import LevelModule, Module

NGRAM, TARGET = LevelModule("ngram", "ngram"), LevelModule("target", "model")


def by(name: str, verifier: str, kind: str = "ngram") -> LevelModule:
    return LevelModule(name, kind, {"verified_by": verifier})


def test_each_level_is_verified_by_the_next() -> None:
    module = Module("m", (NGRAM, LevelModule("small", "model"), TARGET))
    check_cascade(module)
    assert verifiers(module) == {"ngram": "small", "small": "target"}
    assert stages(module) == (("ngram",), ("small",), ("target",))


def test_levels_with_the_same_verifier_are_merged() -> None:
    module = Module("m", (by("ngram", "target"), by("head", "target", "medusa"), TARGET))
    check_cascade(module)
    assert stages(module) == (("ngram", "head"), ("target",))


def test_a_target_alone_is_a_cascade() -> None:
    check_cascade(Module("m", (TARGET,)))
    assert stages(Module("m", (TARGET,))) == (("target",),)


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ((), "module 'm' has no levels"),
        ((NGRAM, NGRAM, TARGET), "level 'ngram' is defined twice"),
        ((LevelModule("x", "medussa"), TARGET), "level 'x': kind 'medussa' is not one of ngram, medusa, eagle, model, self"),
        ((TARGET, NGRAM), "level 'ngram' is last, so it is the target, but its kind is 'ngram', expected model"),
        ((by("a", "b"), by("b", "a"), TARGET), "levels verify each other in a circle: a -> b -> a"),
        ((by("a", "nobody"), TARGET), "level 'a' is verified by 'nobody', which is not a level; levels are a, target"),
        ((NGRAM, by("target", "ngram", "model")), "level 'target' is the target: nothing verifies it, found verified_by 'ngram'"),
    ],
)
def test_a_cascade_that_cannot_run_is_refused(levels: tuple[LevelModule, ...], message: str) -> None:
    with pytest.raises(IrError, match=message):
        check_cascade(Module("m", levels))
