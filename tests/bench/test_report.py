"""Figures, tables and JSON of benchmarks; no test here looks at a clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlsdc.runtime.bench.peer import LlamaBench, parse_speed
from mlsdc.runtime.bench.report import OpTime, Report
from mlsdc.runtime.bench.spread import Figure, by_round, interleave
from mlsdc.runtime.bench.traffic import Traffic
from mlsdc.runtime.errors import MlsdcError


def test_cases_are_run_in_turn_and_the_first_round_is_thrown_away() -> None:
    log: list[str] = []

    def case(name: str) -> float:
        log.append(name)
        return float(len(log))

    found = interleave({"a": lambda: case("a"), "b": lambda: case("b")}, 3)
    assert log == ["a", "b"] * 4
    assert found == {"a": (3, 5, 7), "b": (4, 6, 8)}


def test_a_figure_is_the_median_with_the_lowest_and_the_highest_round() -> None:
    figure = Figure("x", "ms", (3.0, 1.0, 100.0))
    assert (figure.median, figure.low, figure.high) == (3.0, 1.0, 100.0)


def test_ratios_compare_rounds_not_medians() -> None:
    assert by_round((2.0, 30.0), (1.0, 10.0)) == (2.0, 3.0)
    with pytest.raises(ValueError, match="zip"):
        by_round((1.0,), (1.0, 2.0))


def report(**changes: object) -> Report:
    figures = [Figure("decode", "tokens/s", (1.0, 2.0, 3.0), "note"), Figure("streaming read", "GB/s", (30.5, 31.5, 1234.0))]
    return Report("decode", "x.mlsdc", "ab" * 32, "cpu-x", 2, 3, figures, Traffic(1000, 24), **changes)  # type: ignore[arg-type]


def test_json_has_everything_the_table_has() -> None:
    found = json.loads(json.dumps(report(peer="llama-bench on m.gguf", profile=(OpTime("linear", 30, 12.5),)).to_json()))
    assert found == {
        "format": 1, "verb": "decode", "artifact": "x.mlsdc", "sha256": "ab" * 32, "target": "cpu-x", "threads": 2, "rounds": 3,
        "peer": "llama-bench on m.gguf",
        "bytes_per_step": {"weights": 1000, "pages": 24, "total": 1024},
        "figures": [
            {"name": "decode", "unit": "tokens/s", "note": "note", "median": 2, "low": 1, "high": 3, "values": [1, 2, 3]},
            {"name": "streaming read", "unit": "GB/s", "note": "", "median": 31.5, "low": 30.5, "high": 1234, "values": [30.5, 31.5, 1234]},
        ],
        "profile": [{"kernel": "linear", "launches": 30, "microseconds": 12.5}],
    }  # fmt: skip


def test_json_leaves_out_what_was_not_measured() -> None:
    assert {"peer", "profile"}.isdisjoint(report().to_json())


def test_the_table_has_a_line_a_figure_and_the_bytes() -> None:
    lines = list(report(profile=(OpTime("a", 1, 75.0), OpTime("b", 2, 25.0))).lines())
    assert lines[:4] == [
        "decode: x.mlsdc (abababababab), cpu-x, 2 threads, 3 rounds",
        "bytes a step: 1,024 = 1,000 of weights + 24 of pages",
        "                    median        low       high",
        "decode               2.000      1.000      3.000  tokens/s  note",
    ]
    assert lines[4] == "streaming read       31.50      30.50       1234  GB/s"
    assert lines[-1] == "        25.0 us  25.0%     2 x b"


# --- the peer ---


def peer_program(folder: Path, text: str) -> Path:
    """A program that says what llama-bench would, and leaves its arguments in `folder/args`."""
    program = folder / "llama-bench"
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/args\n{text}\n')
    program.chmod(0o755)
    (folder / "m.gguf").touch()
    return program


def test_the_peer_is_asked_for_one_test_with_our_threads(tmp_path: Path) -> None:
    program = peer_program(tmp_path, """echo '[{"avg_ts": 123.5}]'""")
    peer = LlamaBench.parse(f"llama-bench={program}", str(tmp_path / "m.gguf"), 3)
    assert peer.tokens_per_second(generate=64) == 123.5
    assert (tmp_path / "args").read_text() == f"-m {tmp_path}/m.gguf -t 3 -p 0 -n 64 -r 1 -o json\n"


def test_a_peer_that_fails_is_one_line_with_what_it_said_last(tmp_path: Path) -> None:
    program = peer_program(tmp_path, "echo first >&2; echo 'no such model' >&2; exit 3")
    with pytest.raises(MlsdcError, match="^--peer: llama-bench ended with 3 and said: no such model$"):
        LlamaBench.parse(f"llama-bench={program}", str(tmp_path / "m.gguf"), 1).tokens_per_second(prompt=8)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[{}]", '[{"avg_ts": null}]', "[1, 2]"])
def test_what_is_not_a_peers_json_is_refused(text: str) -> None:
    with pytest.raises(MlsdcError, match="^--peer: not llama-bench's JSON"):
        parse_speed(text)


def test_a_peer_is_checked_before_anything_is_measured(tmp_path: Path) -> None:
    program, model = peer_program(tmp_path, ""), str(tmp_path / "m.gguf")
    for peer, file, message in (
        ("vllm=x", model, "--peer: 'vllm=x', expected llama-bench=PATH"),
        ("llama-bench", model, "--peer: 'llama-bench', expected llama-bench=PATH"),
        (f"llama-bench={tmp_path}", model, "is not a program"),
        (f"llama-bench={program}", None, "--peer-model GGUF says which model"),
        (f"llama-bench={program}", str(tmp_path / "none.gguf"), "is not a file"),
    ):
        with pytest.raises(MlsdcError, match=message):
            LlamaBench.parse(peer, file, 1)
