"""`mlsdc bench spec` on an artifact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlsdc.compiler.cli import dispatch
from mlsdc.runtime.controller import replay
from mlsdc.runtime.errors import MlsdcError


def test_bench_spec_measures_an_artifact_and_its_trace_replays(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "abcabcabcabc", "kind": "copy"}\n{"prompt": "hello there", "kind": "other"}\n')
    options = ["--tokens", "24", "--threads", "1", "--json", "-", "--trace", str(tmp_path / "t.jsonl"), "--plot", str(tmp_path / "p.png")]
    assert dispatch(["bench", "spec", str(tiny), "--prompts", str(tmp_path / "p.jsonl"), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [kind["kind"] for kind in report["kinds"]] == ["copy", "other", "all"]
    assert all(kind["different"] == 0 for kind in report["kinds"])
    assert all(kind["length"] >= 1 for kind in report["kinds"])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    events = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert {event["event"] for event in events} >= {"wish", "step"}
    assert json.loads(json.dumps(replay(events))) == events


def test_bench_spec_wants_prompts(tiny: Path) -> None:
    with pytest.raises(MlsdcError, match="--prompts: `mlsdc bench spec` wants a file of prompts"):
        dispatch(["bench", "spec", str(tiny)])
