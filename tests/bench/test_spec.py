"""`mlsdc bench spec`: prompts are read or refused in one line, and figures are what was counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from mlsdc.runtime.bench.prompts import BenchPrompt, read_prompts
from mlsdc.runtime.bench.spec import Side, figures, stalled_s
from mlsdc.runtime.errors import MlsdcError


def test_chats_and_texts_are_read_with_their_kind(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    lines = [{"messages": chat, "kind": "story", "group": "creative"}, {"prompt": "once", "kind": "story"}, {"prompt": "x"}]
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress("\n\n".join(map(json.dumps, lines)).encode()))
    assert read_prompts(tmp_path / "p.jsonl.gz") == [BenchPrompt("creative", chat), BenchPrompt("story", "once"), BenchPrompt("all", "x")]


def test_of_each_kind_the_first_ones_are_taken(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"{i}", "kind": f"{i % 2}"}) + "\n" for i in range(6)))
    assert [prompt.prompt for prompt in read_prompts(tmp_path / "p.jsonl", 1)] == ["0", "1"]


@pytest.mark.parametrize(("text", "message"), [
    ("", "p.jsonl: no prompt in it"), ("\n\n", "p.jsonl: no prompt in it"), ("nonsense", "p.jsonl: line 1: not JSON"),
    ("{}", 'line 1: expected "messages" or "prompt", found {}'), ('"x"', 'line 1: expected "messages" or "prompt"'),
    ('{"prompt": 5}', 'line 1: expected "messages" or "prompt"'),
])
def test_a_file_without_prompts_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(MlsdcError, match=message) as caught:
        read_prompts(tmp_path / "p.jsonl")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MlsdcError, match="cannot be read"):
        read_prompts(tmp_path / "p.jsonl")


def test_ratio_is_of_times_and_length_of_steps() -> None:
    plain = Side(seconds=[2.0, 4.0], tokens=60, steps=60, stepped=60, token_s=[0.1] * 60)
    spec = Side(seconds=[1.0, 2.0], tokens=60, steps=24, stepped=60, token_s=[0.05] * 59 + [1.0])
    found = figures("qa", plain, spec, [(2.0, 1.0), (4.0, 2.0)], 2, 0)
    assert (found.length, found.speed, found.plain_speed, found.ratio) == (2.5, 20.0, 10.0, 2.0)
    assert (found.p50_ms, found.p99_ms) == (50.0, 1000.0)


def test_a_stall_is_what_a_step_took_longer_than_usual() -> None:
    """Steps of 1 s; one of 11; one of 3, which a larger tree explains; deltas of a batch come together."""
    assert stalled_s([0.0, 1.0, 2.0, 2.00001, 13.0, 16.0, 17.0, 18.0]) == pytest.approx(11.0 - 1.0, abs=1e-3)
    assert stalled_s([5.0]) == 0.0
