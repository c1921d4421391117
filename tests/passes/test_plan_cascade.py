"""plan-cascade: a default plan, and cascades that make no sense."""

from __future__ import annotations

from typing import Any

import pytest

from mlsdc.compiler.errors import ConfigError, IrError
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.passes.plan_cascade import PlanCascade
from mlsdc.runtime.manifest import Plan
from tests.passes.graphs import Llama, module_of, row_program

TARGET = module_of(row_program(Llama(layers=1))).target


def cascade(*params: dict[str, Any], target: LevelModule = TARGET) -> Module:
    return Module("tiny", (*(LevelModule(f"ngram{i}", "ngram", p) for i, p in enumerate(params)), target))


def test_drafts_as_much_as_the_level_may_propose() -> None:
    assert PlanCascade().run(cascade({"max_nodes": 16})).plan == Plan(max_draft_tokens=16, draft_tokens=16)


def test_a_target_alone_drafts_nothing() -> None:
    assert PlanCascade().run(cascade()).plan == Plan(max_draft_tokens=0, draft_tokens=0)


def test_leaves_the_levels_alone() -> None:
    module = cascade({"max_nodes": 16, "order": 4})
    assert PlanCascade().run(module).levels == module.levels


@pytest.mark.parametrize("params", [{}, {"max_nodes": 0}, {"max_nodes": 64}, {"max_nodes": "7"}, {"max_nodes": True}])
def test_refuses_a_level_without_a_bound(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^cascade: level 'ngram0': max_nodes is .*, expected 1..63$"):
        PlanCascade().run(cascade(params))


def test_refuses_a_cascade_that_is_none() -> None:
    level = LevelModule("ngram", "ngram", {"max_nodes": 4})
    with pytest.raises(IrError, match="level 'ngram' is defined twice"):
        PlanCascade().run(Module("tiny", (level, level, TARGET)))


def test_refuses_a_target_that_cannot_run() -> None:
    with pytest.raises(ConfigError, match="'target' is the target, but has no 'forward' program"):
        PlanCascade().run(cascade(target=LevelModule("target", "model")))
