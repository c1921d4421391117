"""The controller's native code decides what the plain controller decides, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from once_native import native_lists

from mlsdc.runtime.controller import Controller, Proposal
from mlsdc.runtime.costs import Costs, CostTable
from mlsdc.runtime.native_controller import MakeList, NativeController
from mlsdc.runtime.plan_file import Rate
from mlsdc.runtime.tree import Tree

LEVELS = 3
STEEP = CostTable((128, 768), (1, 4, 8, 9, 16, 64),
                  ((4.4e-3, 5.0e-3, 6.5e-3, 8e-3, 12e-3, 48e-3), (5e-3, 6e-3, 8e-3, 10e-3, 15e-3, 60e-3)), {})
FLAT = CostTable((0,), (1, 16, 64), ((4e-3, 4.5e-3, 9e-3),), {})
Make = Callable[[], NativeController]


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> MakeList:
    from mlsdc.targets.cpu_sample import draft_specs

    return native_lists(tmp_path_factory, "draft", draft_specs())


def tree(rng: random.Random, most: int, tokens: int) -> Tree:
    count = rng.randrange(most + 1)
    parents = tuple(rng.randrange(-1, i) for i in range(count))
    logq = tuple(log(rng.choice((0.01, 0.3, 0.5, 0.9, 0.99, rng.random() + 1e-9))) for _ in range(count))
    return Tree(tuple(rng.randrange(tokens) for _ in range(count)), parents, logq, tuple(rng.randrange(LEVELS) for _ in range(count)))


def text(rng: random.Random, drafted: Tree) -> list[int]:
    """Tokens that follow the tree for a while."""
    tokens: list[int] = []
    at = -1
    while (children := [i for i, parent in enumerate(drafted.parents) if parent == at]) and rng.random() < 0.8:
        at = rng.choice(children)
        tokens.append(drafted.tokens[at])
    return [*tokens, rng.randrange(4)]


def play(controller: Controller, seed: int, requests: int, steps: int, table: CostTable, draft_s: float) -> list[object]:
    """What it decides while requests come and go; events depend on the seed and on its own decisions."""
    rng = random.Random(seed)
    drafters = {i: controller.drafter(i) for i in range(requests)}
    told: list[object] = []
    wishes = dict.fromkeys(drafters, 12)
    for step in range(steps):
        if rng.random() < 0.05:
            gone = rng.choice(list(drafters))
            controller.leave(drafters.pop(gone))
            drafters[1000 + step] = controller.drafter(1000 + step)
            wishes[1000 + step] = 12
        sequences, context = len(drafters), rng.randrange(1200)
        asked = [i for i in drafters if wishes[i] and controller.welcome(drafters[i], sequences)]
        proposals = [Proposal(drafters[i], tree(rng, wishes[i], 4), i % 3 == 0) for i in asked]
        rows = sequences + rng.randrange(3)
        kept = controller.choose(proposals, rows, sequences, context, draft_s * len(asked)) if asked else []
        told.append([(t.tokens, t.parents, t.levels) for t in kept])
        nodes = sum(map(len, kept))
        controller.step(rows + nodes, context, table.step_s(rows + nodes, context) * rng.uniform(0.8, 2.0), nodes)
        for proposal in proposals:
            controller.learn(proposal, text(rng, proposal.tree))
        for i, drafter in drafters.items():
            wishes[i] = controller.wish(drafter, 12)
        told.append(dict(wishes))
        told.append([(d.asked, d.worth, d.taken, d.pause, d.last_pause, d.paused_at) for d in drafters.values()])
    return told


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 20), st.booleans(), st.sampled_from([FLAT, STEEP]), st.sampled_from([1e-5, 3e-3]))
def test_every_decision_is_the_plain_controllers(lists: MakeList, seed: int, requests: int, known: bool, table: CostTable,
                                                 draft_s: float) -> None:
    plain, native = Controller(Costs(table)), NativeController(lists, LEVELS, Costs(table))
    if known:
        for controller in (plain, native):
            controller.know([Rate("a", 1, False, 30, 0.5, 0.6), Rate("b", 2, True, 300, 0.7, 0.2)], ("a", "b", "c"))
    assert play(native, seed, requests, 60, table, draft_s) == play(plain, seed, requests, 60, table, draft_s)
