"""`explain`, `--timing` and MLSDC_LOG: what the compiler says about itself."""

from __future__ import annotations

import io
import json

import pytest

from mlsdc.compiler import cli
from mlsdc.compiler.log import LoggedProgress, log_level
from mlsdc.compiler.progress import Silent
from mlsdc.compiler.timing import Timing, recording, timed
from mlsdc.runtime.errors import MlsdcError
from tests.inside.model import Tiny


def test_explain_names_cascade_cache_passes_and_kernels(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(tiny.artifact)]) == 0
    said = capsys.readouterr().out
    assert "lookup (ngram) -> target (model): up to 7 nodes a step" in said
    assert "bf16, 16 bits an element: 512 bytes a token" in said
    assert "fired   4 x  x + linear_q(h, w) -> linear_q(h, w, x)" in said
    assert "declined at all" in said
    assert "kernels for " in said


def test_explain_as_json_is_the_artifacts_own(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(tiny.artifact), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tiny.artifact / "explain.json").read_text())


def test_timing_has_every_stage_pass_and_kernel() -> None:
    assert not recording()
    timing = Timing(Silent())
    with timing:
        assert recording()
        timing.stage("passes")
        timing.step(1, 2, "fold-constants")
        timing.step(2, 2, "fuse-qkv")
        timing.stage("kernels")
        with timed("kernel rope"):
            pass
    assert not recording()
    assert list(timing.stages) == ["passes", "kernels"]
    assert list(timing.passes) == ["fold-constants", "fuse-qkv"]
    assert list(timing.kernels) == ["kernel rope"]
    assert sum(timing.passes.values()) <= timing.stages["passes"]
    assert [line.split(" s ")[1].strip() for line in timing.report()] == \
        ["passes", "fold-constants", "fuse-qkv", "kernels", "kernel rope", "in all"]


@pytest.mark.parametrize(("level", "lines"), [("info", 1), ("debug", 2)])
def test_each_rung_of_the_ladder_says_more(level: str, lines: int) -> None:
    out = io.StringIO()
    progress = LoggedProgress(level, out)
    progress.stage("weights")
    progress.step(1, 1, "layers.0.mlp.down")
    progress.close()
    assert len(out.getvalue().splitlines()) == lines


def test_a_level_that_is_not_on_the_ladder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLSDC_LOG", "loud")
    with pytest.raises(MlsdcError, match="MLSDC_LOG: 'loud' is not a level; levels are info, debug"):
        log_level()
