"""`mlsdc plan`: cascades priced without weights, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlsdc.compiler.cli import dispatch
from mlsdc.runtime.errors import MlsdcError

ALPHA = "llama-3-8b: {llama-3.2-1b: 0.75}\n"


def plan(folder: Path, *options: str, alpha: str = ALPHA, shapes: str = "llama-3-8b,llama-3.2-1b", hardware: str = "h100") -> int:
    (folder / "alpha.yaml").write_text(alpha)
    return dispatch(["plan", "--shapes", shapes, "--alpha", str(folder / "alpha.yaml"), "--hardware", hardware, *options])


def test_a_small_batch_drafts_and_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, "--batch", "1,256", "--context", "32k", "--kv", "bf16", "--json", "-") == 0
    one, many = json.loads(capsys.readouterr().out)
    assert one["plan"].startswith("llama-3.2-1b: chain of")
    assert one["tokens_s"] > 1.5 * one["plain_tokens_s"]
    assert many["plan"] == "does not fit"


def test_fewer_bits_a_key_are_faster_at_long_contexts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, "--batch", "8", "--context", "32k", "--kv", "bf16,int8,int4", "--json", "-") == 0
    speeds = [case["plain_tokens_s"] for case in json.loads(capsys.readouterr().out)]
    assert speeds == sorted(speeds)


def test_the_table_says_that_nothing_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, alpha="llama-3-8b: {llama-3.2-1b: 0.01}\n") == 0
    said = capsys.readouterr().out
    assert "nothing of it measured" in said
    assert "without llama-3.2-1b: brings" in said


@pytest.mark.parametrize(("options", "changes", "message"), [
    ((), {"shapes": "llama-9"}, "--shapes: 'llama-9' is not known; known are"),
    ((), {"shapes": "llama-3-8b,llama-3-8b"}, "--shapes: a name is given twice"),
    ((), {"hardware": "abacus"}, "--hardware: 'abacus' is not known"),
    (("--batch", "0"), {}, "--batch: '0', expected numbers"),
    (("--context", "long"), {}, "--context: 'long', expected numbers such as 1,8 or 2k,32k"),
    (("--max-nodes", "99"), {}, "--max-nodes: 99, expected 1 to 64"),
    ((), {"alpha": "- 1"}, "expected verifier: {drafter: rate}"),
    ((), {"alpha": "llama-3-8b: {llama-3.2-1b: 1.5}"}, "llama-3-8b.llama-3.2-1b: 1.5, expected a rate from 0 to below 1"),
    ((), {"alpha": "a: {b: 0.5}"}, "nobody's rate for 'llama-3.2-1b'; expected one of llama-3-8b to have it"),
])
def test_a_mistake_is_one_line(tmp_path: Path, options: tuple[str, ...], changes: dict[str, str], message: str) -> None:
    with pytest.raises(MlsdcError) as caught:
        plan(tmp_path, *options, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
