"""`mlsdc tune`: what the plan is measured with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlsdc.compiler import cli_tune
from mlsdc.compiler.cli import main
from mlsdc.runtime.bench import prompts, tune
from mlsdc.runtime.errors import MlsdcError


@pytest.mark.parametrize(("chosen", "file"), [(True, "mine.json"), (False, None)])
def test_the_plan_is_measured_with_the_kernels_that_were_just_chosen(
        chosen: bool, file: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever they were written; a CPU has none."""
    given: list[Any] = []

    def measured(*_: Any, kernel_file: Path | None, **__: Any) -> None:
        given.append(kernel_file)
        raise MlsdcError("enough")

    class Two:
        manifest = type("Manifest", (), {"levels": (None, None)})

        @staticmethod
        def open(path: Path) -> type[Two]:
            return Two

    monkeypatch.setattr(cli_tune, "choose_kernels", lambda args: chosen)
    monkeypatch.setattr(cli_tune, "Artifact", Two)
    monkeypatch.setattr(prompts, "read_prompts", lambda *_: [])
    monkeypatch.setattr(tune, "tune", measured)
    assert main(["tune", "a.mlsdc", "--prompts", "p.jsonl", "--kernels-output", "mine.json"]) == 2
    assert "enough" in capsys.readouterr().err
    assert given == [None if file is None else Path(file)]
