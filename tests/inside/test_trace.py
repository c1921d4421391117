"""`mlsdc trace`: a well-formed trace of what the engine did, and the same text as without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlsdc.compiler import cli
from mlsdc.compiler.trace import trace
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.sampling_params import SamplingParams
from tests.inside.model import Tiny

PROMPT = "abcabcabcabcabc"


@pytest.fixture(scope="module")
def traced(tiny: Tiny) -> dict[str, Any]:
    with Engine.load(tiny.artifact, threads=1) as engine:
        return json.loads(json.dumps(trace(engine, PROMPT, SamplingParams(max_tokens=24))))  # type: ignore[no-any-return]


def spans(traced: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [event for event in traced["traceEvents"] if event.get("cat") == category]


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(outer["ts"] - 1 <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1)


def test_tracing_changes_no_token(tiny: Tiny, traced: dict[str, Any]) -> None:
    with Engine.load(tiny.artifact, threads=1) as engine:
        (result,) = engine.generate([PROMPT], SamplingParams(max_tokens=24))
    assert traced["otherData"]["text"] == result.text


def test_spans_nest_kernels_in_verifies_in_steps(traced: dict[str, Any]) -> None:
    steps, verifies = spans(traced, "step"), spans(traced, "verify")
    assert len(steps) == len(verifies)
    for inner, outers in (("verify", steps), ("draft", steps), ("commit", steps)):
        assert all(any(inside(event, outer) for outer in outers) for event in spans(traced, inner)), inner
    programs = [*verifies, *spans(traced, "copy")]
    assert all(any(inside(event, outer) for outer in programs) for event in spans(traced, "kernel"))


def test_every_launch_of_a_verify_is_a_span_named_by_its_node(traced: dict[str, Any]) -> None:
    first = spans(traced, "verify")[0]
    nodes = [event["name"] for event in spans(traced, "kernel") if inside(event, first)]
    assert {"embed", "layers.0.attn.attend", "layers.1.mlp.residual", "lm_head", "choices"} <= set(nodes)


def test_the_summary_counts_what_the_statistics_count(traced: dict[str, Any]) -> None:
    summary = traced["otherData"]["summary"]
    assert summary["tokens"] == 24
    assert summary["drafted"] == sum(event["args"]["nodes"] for event in spans(traced, "draft"))
    assert summary["accepted"] == sum(event["args"]["accepted"] for event in spans(traced, "commit"))
    assert sum(summary["kernels"].values()) == pytest.approx(sum(event["dur"] for event in spans(traced, "kernel")), rel=0.01)


def test_without_kernels_there_is_one_span_a_verify(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "trace.json"
    assert cli.main(["trace", str(tiny.artifact), "--prompt", PROMPT, "-o", str(output), "--max-tokens", "4", "--raw", "--no-kernels"]) == 0
    made = json.loads(output.read_text())
    assert not spans(made, "kernel")
    assert spans(made, "verify")
    assert "4 after a prompt of 15" in capsys.readouterr().out


def test_the_viewer_shows_what_a_trace_measured(tiny: Tiny, tmp_path: Path) -> None:
    assert cli.main(["trace", str(tiny.artifact), "--prompt", PROMPT, "-o", str(tmp_path / "t.json"), "--raw"]) == 0
    assert cli.main(["view", str(tiny.artifact), str(tmp_path / "t.json"), "-o", str(tmp_path / "page.html")]) == 0
    assert '"acceptance_length"' in (tmp_path / "page.html").read_text(encoding="utf-8")
