"""Drafts by two native calls a step are what the plain path drafts, while requests come and go and their slots move."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest
from fake_device import VOCAB, make_manifest
from hypothesis import given, settings
from hypothesis import strategies as st
from once_native import native_functions, native_lists, ngram_library

from mlsdc.runtime.controller import Controller
from mlsdc.runtime.costs import Costs, CostTable
from mlsdc.runtime.device.base import Device
from mlsdc.runtime.drafting import Drafting
from mlsdc.runtime.levels.ngram_native import Functions, NativeNgramLevel
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.native_controller import MakeList, NativeController
from mlsdc.runtime.request import Request, StepItem
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.step import Limits
from mlsdc.runtime.tree import walk

NGRAM = LevelInfo("ngram", "ngram", {"order": 1, "max_nodes": 12, "min_probability": 0.0})
TABLE = CostTable((0,), (1, 16, 64, 512), ((4e-3, 4.5e-3, 9e-3, 40e-3),), {})
Native = tuple[Functions, MakeList]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    return native_functions(tmp_path_factory, *ngram_library()), native_lists(tmp_path_factory, *ngram_library())


def drafting(native: Native, *, batched: bool) -> Drafting:
    """Whose own time costs nothing, so that both ways decide by the same numbers."""
    functions, lists = native
    manifest = make_manifest(Limits(512, 64, 512, 512, 16), levels=[NGRAM])
    made = Drafting(manifest, [NativeNgramLevel(NGRAM, 0, functions)], clock=lambda: 0.0)
    made.controller = Controller(Costs(TABLE))
    if batched:
        made.use(cast("Device", SimpleNamespace(native=functions, host_list=lists)))
        assert isinstance(made.controller, NativeController)
        assert made._batch is not None
    made._host_s = 0.0
    return made


def play(made: Drafting, seed: int, steps: int, at_once: Sequence[int]) -> list[object]:
    """The trees and wishes of every step; requests come `at_once[i]` at a time, and texts repeat themselves."""
    rng = random.Random(seed)
    running: list[Request] = []
    told: list[object] = []
    number = 0
    for step in range(steps):
        for _ in range(at_once[step] if step < len(at_once) else rng.random() < 0.2):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 9, 70)))]
            request = Request(prompt * 2, SamplingParams(temperature=rng.choice((0.0, 0.9)), seed=rng.randrange(99)), max_length=500,
                              stop_ids=frozenset(), budget=12)
            request.id = number = number + 1  # the same both ways: first pauses depend on it
            request.num_computed = len(request.tokens) - 1
            running.append(request)
        items = [StepItem(request, 1, decodes=True) for request in running]
        for item in items:
            item.budget = rng.randrange(13) and min(item.request.wish, 12)
        made.draft(items)
        told.append([(item.tree.tokens, item.tree.parents, item.request.wish) for item in items])
        nodes = 0
        for item in items:
            request = item.request
            assert len(item.tree) <= item.budget
            nodes += len(item.tree)
            period = request.num_prompt // 2
            right = [request.tokens[-period] if rng.random() < 0.8 else rng.randrange(VOCAB) for _ in range(1 + len(item.tree))]
            chosen, tokens = walk(item.tree, right)
            request.tokens += tokens
            request.num_computed += len(tokens)
            made.committed(item, chosen)
        made.learned()
        if items:
            made.controller.step(len(items) + nodes, 200, TABLE.step_s(len(items) + nodes, 200) * rng.uniform(0.8, 1.4), nodes)
        for request in [request for request in running if rng.random() < 0.06]:
            running.remove(request)
            made.end(request)
    return told


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 20), max_size=12))
def test_every_step_drafts_what_the_plain_path_drafts(native: Native, seed: int, at_once: list[int]) -> None:
    assert play(drafting(native, batched=True), seed, 40, at_once) == play(drafting(native, batched=False), seed, 40, at_once)
