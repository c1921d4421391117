"""`mlsdc bench spec --cascade`: several cascades of an artifact's levels in one run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlsdc.runtime.bench.cascades import cascade_of
from mlsdc.runtime.bench.prompts import BenchPrompt
from mlsdc.runtime.bench.spec import measure
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import MlsdcError


@pytest.fixture(scope="module")
def engine(stacked: Path) -> Iterator[Engine]:
    """Counts, a smaller model and the target's first layer, each of which verifies the one before it."""
    with Engine.load(stacked, threads=1) as loaded:
        yield loaded


def test_every_cascade_is_run_beside_plain_decoding(engine: Engine) -> None:
    prompts = [BenchPrompt("a", [1, 2, 3, 1, 2, 3, 1, 2]), BenchPrompt("b", [(7 * i + 3) % 256 for i in range(20)])]
    cascades = ["counts", "counts>small", "counts+small>first"]
    drafting = engine.drafting
    before = drafting.level, drafting.controller
    found = measure(engine, prompts, max_tokens=12, cascades=cascades)
    assert (drafting.level, drafting.controller) == before, "what is measured next is the artifact's cascade again"
    assert [(of.cascade, of.kind) for of in found] == [(cascade, kind) for cascade in cascades for kind in ("a", "b", "all")]
    assert all(of.different == 0 and of.speed > 0 and of.ratio > 0 for of in found)


@pytest.mark.parametrize(("text", "message"), [
    ("nobody", "--cascade: 'nobody' is not a level of the artifact; levels are counts, small, first"),
    ("counts>>small", "--cascade: '' is not a level of the artifact; levels are counts, small, first"),
    ("small>counts", "--cascade: 'small>counts': level 'counts': a 'ngram' level cannot verify the level below it"),
])
def test_what_is_no_cascade_is_one_line(engine: Engine, text: str, message: str) -> None:
    with pytest.raises(MlsdcError) as caught:
        cascade_of(engine, text, 8, "--cascade")
    assert str(caught.value) == message
