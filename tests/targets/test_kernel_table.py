"""The record of what every kernel of two models takes (targets/kernel_table.tsv): it covers what it says, and nothing in it spills."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlsdc.compiler.cli import main
from mlsdc.compiler.cli_targets_compile import CACHES, kernels, recorded
from mlsdc.targets.hardware import GPUS
from mlsdc.targets.kernel_table import GPU_OF, Line, read_table, source_digest, summary, write_table
from mlsdc.targets.triton_build import render

RECORDED = [(sm, model) for sm in GPU_OF for model in recorded(sm)]
FORMATS = {cache.replace("/", "_").replace("-", "") for cache in CACHES}
LINE = Line(90, "tiny", "linear_q", "linear_q_w8", "0123456789ab", 48, 24576, 128, 3, 16, 0)


@pytest.fixture(scope="module")
def table() -> list[Line]:
    return read_table()


def test_nothing_spills_and_everything_fits(table: list[Line]) -> None:
    for line in table:
        gpu = GPU_OF[line.sm]
        assert line.stack_bytes == 0
        assert line.shared_bytes <= gpu.shared_bytes
        assert line.registers * line.threads <= gpu.registers


@pytest.mark.parametrize(("sm", "model"), RECORDED)
def test_attention_over_every_cache_is_there(table: list[Line], sm: int, model: str) -> None:
    names = {line.kernel.removeprefix("attend_split_").partition("_p32")[0] for line in table
             if (line.sm, line.model, line.template) == (sm, model, "attend_split")}
    assert names == FORMATS


@pytest.mark.parametrize(("sm", "model"), RECORDED)
def test_every_kernel_of_a_model_is_there_as_it_is_generated_now(table: list[Line], sm: int, model: str) -> None:
    """Else `mlsdc targets --compile` is to be run again: what the table says is of another text."""
    wanted = {spec.key: source_digest(render(spec)) for spec in kernels(model, GPU_OF[sm].name)}
    assert {line.kernel: line.source for line in table if (line.sm, line.model) == (sm, model)} == wanted


def test_a_written_table_is_read_back(tmp_path: Path) -> None:
    lines = [LINE, replace(LINE, sm=80, registers=50)]
    write_table(lines, tmp_path / "table.tsv")
    assert read_table(tmp_path / "table.tsv") == lines[::-1]


def test_a_summary_shows_the_worst_of_a_template() -> None:
    text = list(summary([LINE, replace(LINE, kernel="another", registers=90, threads=256)]))[1]
    assert text.split() == ["sm_90", "tiny", "linear_q", "2", "90", "24,576", f"{GPUS['h100'].shared_bytes:,}", "4-8", "3", "none"]


def test_an_architecture_that_nothing_is_generated_for_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets", "--compile", "sm_70"]) == 2
    assert "--compile: 'sm_70' is no architecture that kernels are generated for; there are sm_80, sm_86" in capsys.readouterr().err


def test_targets_prints_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets", "--kernels"]) == 0
    assert "llama-3-8b" in capsys.readouterr().out
