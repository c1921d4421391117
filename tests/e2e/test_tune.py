"""`mlsdc tune` on an artifact: what it writes is read by the engine and told by `explain`; broken and foreign plans."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlsdc.compiler.cli import dispatch
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import ArtifactError, MlsdcError
from mlsdc.runtime.plan_file import PlanFile, plan_path


@pytest.fixture(scope="module")
def tuned(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny artifact with a plan beside it, in place of one that could not be read."""
    folder = tmp_path_factory.mktemp("tuned")
    shutil.copytree(tiny, folder / "tiny.mlsdc")
    plan_path(folder / "tiny.mlsdc").write_text("{}")
    (folder / "p.jsonl").write_text('{"prompt": "abcabcabcabcabc"}\n{"prompt": "hello there"}\n')
    options = ["--prompts", str(folder / "p.jsonl"), "--tokens", "24", "--rounds", "1", "--threads", "1"]
    assert dispatch(["tune", str(folder / "tiny.mlsdc"), *options]) == 0
    return folder / "tiny.mlsdc"


def test_the_plan_has_costs_rates_and_speeds(tuned: Path) -> None:
    plan = PlanFile.read(plan_path(tuned))
    assert plan.costs.rows[0] == 1
    assert all(line == tuple(sorted(line)) for line in plan.costs.seconds)
    assert plan.costs.draft_s["lookup"] > 0
    assert {rate.level for rate in plan.rates} == {"lookup"}
    assert all(0 <= rate.hit <= 1 and 0 <= rate.mass <= 1 for rate in plan.rates)
    assert all(sum(chances) <= 1 + 1e-9 for chances in plan.ranks.values())
    assert {speed.name for speed in plan.speeds} >= {"off", "chosen by the controller", "always 2 nodes"}
    assert all(speed.measured for speed in plan.speeds)


def test_an_engine_begins_with_it(tuned: Path) -> None:
    with Engine.load(tuned, threads=1) as engine:
        assert engine.drafting.plan_note.startswith("tiny.plan.json: 2 prompts")
        assert engine.drafting.controller.costs.table == PlanFile.read(plan_path(tuned)).costs


def test_explain_tells_it(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["explain", str(tuned)]) == 0
    said = capsys.readouterr().out
    assert "tuned on cpu" in said
    assert "lookup     kept" in said or "lookup     dropped: brings" in said
    assert "of plain decoding" in said
    assert "always 2 nodes" in said


def test_a_plan_of_another_machine_or_artifact_is_not_used_and_that_is_said(tuned: Path, tmp_path: Path) -> None:
    raw = json.loads(plan_path(tuned).read_text())
    for key, found in (("machine", "another machine"), ("artifact", "another artifact")):
        (tmp_path / "x.json").write_text(json.dumps({**raw, key: "else"}))
        with Engine.load(tuned, threads=1, plan_file=tmp_path / "x.json") as engine:
            assert engine.drafting.plan_note.startswith(f"shipped default: x.json is of {found}")


@pytest.mark.parametrize(("text", "message"), [
    ("nonsense", "not a plan"), ("{}", "not a plan"), ('{"format": 99}', "plan format 99, this runtime reads 1"),
])
def test_a_broken_plan_is_one_line(tuned: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ArtifactError, match=message) as caught:
        Engine.load(tuned, threads=1, plan_file=tmp_path / "x.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [
    {"rows": [2, 1]}, {"rows": []}, {"seconds": [[1.0]]}, {"seconds": "x"}, {"contexts": [1, 2, 3]},
    {"contexts": [9], "seconds": [[]]}, {"draft_s": []}, {"draft_s": {"counts": "x"}}, {"draft_s": {"counts": -1.0}},
])
def test_costs_that_are_none_are_refused(tuned: Path, tmp_path: Path, change: dict[str, object]) -> None:
    raw = json.loads(plan_path(tuned).read_text())
    (tmp_path / "x.json").write_text(json.dumps({**raw, "costs": {**raw["costs"], **change}}))
    with pytest.raises(ArtifactError, match="x.json: not a plan"):
        PlanFile.read(tmp_path / "x.json")


RATE: dict[str, object] = {"level": "counts", "depth": 1, "sampled": False, "steps": 3, "mass": 0.5, "hit": 0.5}


@pytest.mark.parametrize("change", [
    {"rates": [{**RATE, "depth": "a"}]}, {"rates": [{**RATE, "depth": 0}]}, {"rates": [{**RATE, "mass": float("nan")}]},
    {"rates": [{**RATE, "hit": -5}]}, {"rates": [{"level": "counts"}]}, {"ranks": [1]}, {"host_s": float("nan")}, {"dropped": 3},
    {"speeds": [{"name": "a", "predicted": "x", "measured": None, "length": 1}]},
    {"costs": {"contexts": [2, 2], "rows": [1, 2], "seconds": [[0.1, 0.2], [0.1, 0.2]], "draft_s": {}}},
])
def test_figures_that_are_none_are_refused_before_anything_uses_them(tuned: Path, tmp_path: Path, change: dict[str, object]) -> None:
    raw = json.loads(plan_path(tuned).read_text())
    (tmp_path / "x.json").write_text(json.dumps({**raw, "rates": [RATE]}))
    assert PlanFile.read(tmp_path / "x.json").rates[0].hit == 0.5
    (tmp_path / "x.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ArtifactError, match="x.json: not a plan"):
        PlanFile.read(tmp_path / "x.json")


def test_a_plan_that_is_asked_for_must_be_there(tuned: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such plan; `mlsdc tune` makes it"):
        Engine.load(tuned, threads=1, plan_file=tmp_path / "none.json")


def test_tune_on_an_empty_prompt_file_is_one_line(tuned: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("\n")
    with pytest.raises(MlsdcError, match="p.jsonl: no prompt in it"):
        dispatch(["tune", str(tuned), "--prompts", str(tmp_path / "p.jsonl")])
