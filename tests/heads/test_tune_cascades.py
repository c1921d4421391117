"""`mlsdc tune` and `mlsdc explain` on cascades of several levels."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.compiler.cli import dispatch
from mlsdc.runtime.bench.prompts import BenchPrompt
from mlsdc.runtime.bench.replayed import FIXED, DraftCost, Texts, marginal
from mlsdc.runtime.bench.tune import Bench, Sweep, timed
from mlsdc.runtime.costs import DEFAULT
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.plan_file import PlanFile
from mlsdc.runtime.sampling_params import SamplingParams

PROMPTS = [BenchPrompt("a", [1, 2, 3, 1, 2, 3, 1, 2]), BenchPrompt("b", [(7 * i + 3) % 256 for i in range(20)])]
TOKENS = 12


def bench(engine: Engine) -> Bench:
    engine.drafting.take(None, "tuning")
    return Bench(engine, PROMPTS, TOKENS, DEFAULT, [level.name for level in engine.manifest.levels])


@pytest.mark.parametrize(("name", "some", "numbers"), [
    ("stacked", ["counts"], {0}), ("stacked", ["counts", "small"], {1}), ("stacked", ["counts", "small", "first"], {2}),
    ("merged", ["eagle"], {1}), ("merged", ["counts", "medusa"], {0, 2})])
def test_what_some_levels_propose_is_asked_of_them_alone(
        name: str, some: list[str], numbers: set[int], request: pytest.FixtureRequest) -> None:
    """In a stack the nodes are the upper level's: what the lower one brings is seen without it."""
    with Engine.load(request.getfixturevalue(name), threads=1) as engine:
        texts = bench(engine).texts(some)
        assert {level for step in texts.steps for level in step.tree.levels} == numbers


def test_every_position_is_followed_by_its_text(stacked: Path) -> None:
    with Engine.load(stacked, threads=1) as engine:
        found = bench(engine).texts(["counts", "small"])
        (plain,) = engine.generate([PROMPTS[0].prompt], SamplingParams(max_tokens=TOKENS))
    first = [step for step in found.steps if step.request == 0]
    assert [step.following for step in first] == [tuple(plain.token_ids[at:]) for at in range(1, 1 + len(first))]
    assert len(first) >= TOKENS - 2
    assert [step.context for step in first] == [len(plain.prompt_token_ids) + at for at in range(len(first))]
    assert {step.sampled for step in found.steps if step.request % 2} == {True}


def test_a_sweep_sends_trees_of_many_sizes_and_changes_no_text(merged: Path) -> None:
    with Engine.load(merged, threads=1) as engine:
        plain = engine.generate([PROMPTS[0].prompt], SamplingParams(max_tokens=40))[0].token_ids
        engine.drafting.controller = sweep = Sweep()
        with timed(engine, None, sweep.asking):
            assert engine.generate([PROMPTS[0].prompt], SamplingParams(max_tokens=40))[0].token_ids == plain
        assert "propose_all" not in vars(engine.drafting.level)
    rows = [rows for rows, _, _ in sweep.steps]
    assert len({*rows}) > 2
    assert max(rows) <= 17


def test_drafts_are_timed_by_size(merged: Path) -> None:
    with Engine.load(merged, threads=1) as engine:
        cost = bench(engine).texts(["counts", "eagle", "medusa"]).draft
    assert set(cost.sizes) > {size for size in FIXED if size < max(cost.sizes)}
    assert all(seconds > 0 for seconds in cost.seconds)


def test_a_level_costs_what_drafting_takes_longer_with_it() -> None:
    costs = {("a", "b"): 5.0, ("a",): 2.0, ("b",): 4.0}
    found = marginal(["a", "b"], lambda some: Texts([], DraftCost((64,), (costs[tuple(some)],))))
    assert found == {"a": 1.0, "b": 3.0}
    assert marginal(["a"], lambda some: Texts([], DraftCost((64,), (2.0,)))) == {"a": 2.0}


def test_explain_says_of_every_level_whether_it_is_kept(stacked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, plan = tmp_path / "p.jsonl", tmp_path / "x.plan.json"
    prompts.write_text('{"prompt": "abcabcabcabc"}\n{"prompt": "hello there"}\n')
    assert dispatch(["tune", str(stacked), "--prompts", str(prompts), "--tokens", str(TOKENS), "--rounds", "1", "--threads", "1",
                     "-o", str(plan)]) == 0
    found = PlanFile.read(plan)
    assert set(found.costs.draft_s) == {"counts", "small", "first"}
    assert all(speed.measured for speed in found.speeds if not speed.name.startswith(("only", "all of")))
    capsys.readouterr()
    assert dispatch(["explain", str(stacked), "--plan", str(plan)]) == 0
    said = capsys.readouterr().out
    for level in ("counts", "small", "first"):
        assert f"  {level:10} {'dropped: brings' if level in found.dropped else 'kept: '}" in said


@pytest.mark.parametrize(("name", "said"), [
    ("stacked", "  counts (ngram) -> small (model) -> first (self) -> "),
    ("merged", "  counts (ngram) + eagle (eagle) + medusa (medusa) -> ")])
def test_explain_draws_merged_levels_side_by_side(
        name: str, said: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["explain", str(request.getfixturevalue(name))]) == 0
    assert said in capsys.readouterr().out
