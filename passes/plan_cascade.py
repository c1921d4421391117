"""plan-cascade: how many nodes the levels draft when nobody has measured anything yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mlsdc.compiler.cascade import check_cascade
from mlsdc.compiler.errors import ConfigError
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.pipeline import Pass
from mlsdc.runtime.manifest import Plan
from mlsdc.runtime.tree import MAX_NODES


@dataclass(frozen=True)
class PlanCascade(Pass):
    """Keep the levels as they are given, check them, and set the module's default plan.

    Before::

        levels: ngram {max_nodes=16}, target

    After::

        levels: ngram {max_nodes=16}, target    plan: max_draft_tokens=16, draft_tokens=16

    Both are the most nodes a level may propose: what of them is worth verifying is decided step by step
    (runtime/controller.py). A cascade without a drafting level gets the plan 0, 0.

    Raises, naming the level: IrError for a cascade that is none (compiler.cascade.check_cascade); ConfigError for a target without a
    `forward` program, and for a drafting level whose `max_nodes` is missing or outside 1..63.
    """

    name: ClassVar[str] = "plan-cascade"

    def run(self, module: Module) -> Module:
        check_cascade(module)
        if "forward" not in module.target.graphs:
            raise ConfigError(f"cascade: level '{module.target.name}' is the target, but has no 'forward' program")
        widest = max((max_nodes(level) for level in module.levels[:-1]), default=0)
        return replace(module, plan=Plan(max_draft_tokens=widest, draft_tokens=widest))


def max_nodes(level: LevelModule) -> int:
    """The most nodes the level, or the merge it is one of, may propose."""
    nodes = level.params.get("max_nodes")
    if "merge_nodes" in level.params:
        nodes = level.params["merge_nodes"]
    if type(nodes) is not int or not 1 <= nodes <= MAX_NODES:  # True is no number of nodes
        raise ConfigError(f"cascade: level '{level.name}': max_nodes is {nodes}, expected 1..{MAX_NODES}")
    return nodes
