"""`mlsdc bench` on a real artifact: what it counts, and that every verb answers. Never how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlsdc.compiler.cli import main
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.bench import STREAM_BLOCK
from mlsdc.runtime.bench.rig import Rig
from mlsdc.runtime.bench.stream import StreamRead
from mlsdc.runtime.errors import CapacityError, DeviceError

SMALL = 8 * STREAM_BLOCK


@pytest.fixture(autouse=True)
def _small_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlsdc.runtime.bench.stream.BYTES", SMALL)
    monkeypatch.setattr(StreamRead.__init__, "__defaults__", (SMALL,))


def bench(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["bench", *args, "--threads", "1", "--rounds", "1", "--json", "-"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def figures(report: dict[str, Any]) -> list[str]:
    names = [figure["name"] for figure in report["figures"]]
    assert len(names) == len(set(names))
    assert all(len(figure["values"]) == report["rounds"] and figure["low"] > 0 for figure in report["figures"])
    return names


def test_a_decode_step_reads_the_weight_file_and_its_positions(tiny: Path) -> None:
    artifact = Artifact.open(tiny)
    with Rig(tiny, threads=1) as rig:
        step = rig.traffic(1, 33)
        sizes = rig.weight_bytes
        # the tied table is read whole by the head, and a row of it by each lookup
        assert step.weights == sum(sizes.values()) + sizes["w.embed"] // artifact.manifest.model.vocab_size
        assert step.pages == 33 * rig.geometry.bytes_per_token
        assert rig.traffic(8, 33).weights == sum(sizes.values()) + sizes["w.embed"] * 8 // artifact.manifest.model.vocab_size


def test_decode_counts_compares_and_profiles(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(capsys, "decode", str(tiny), "--tokens", "8", "--profile")
    assert figures(report) == ["decode", "step", "step: bytes / time", "step: of the streaming read", "streaming read"]
    with Rig(tiny, threads=1) as rig:
        read = rig.traffic(1, 6)  # one prompt token, half of 8 tokens, and the row's own position
        launches = rig.program.launches
    assert report["bytes_per_step"] == {"weights": read.weights, "pages": read.pages, "total": read.total}
    assert sum(op["launches"] for op in report["profile"]) == len(launches)
    assert (report["verb"], report["target"], report["threads"]) == ("decode", rig.device.name, 1)


def test_prefill_and_verify_answer(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures(bench(capsys, "prefill", str(tiny), "--lengths", "8,40")) == ["prefill 8", "prefill 40", "streaming read"]
    names = figures(bench(capsys, "verify", str(tiny), "--context", "20", "--rows", "4,8"))
    assert names[::2] == ["context 20, 1 row", "context 20, 1 row: of the streaming read", "context 20, 4 rows / 1 row",
                          "context 20, 8 rows / 1 row"]


def test_startup_times_a_fresh_process(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures(bench(capsys, "startup", str(tiny))) == ["import", "open", "first token", "all"]


def test_a_measured_step_has_the_choices_of_the_engine(tiny: Path) -> None:
    """The rows that are timed are the rows that are served: same tokens in, same choice out."""
    with Rig(tiny, threads=1) as rig:
        rig.set_rows(0, 20, drafted=False)
        tokens = rig.memory.buffers.tokens[:20].tolist()
        rig.forward.run()
        choice = int(rig.memory.buffers.choices[0])
        from mlsdc.runtime.sampling_params import SamplingParams

        (result,) = rig.engine.generate([tokens], SamplingParams(max_tokens=1, ignore_eos=True))
        assert result.token_ids == [choice]


def test_the_streaming_read_notices_what_it_left_out(tiny: Path) -> None:
    with Rig(tiny, threads=2) as rig:
        assert rig.stream.run() > 0
        rig.stream._data.view(np.int32)[12345] = 7
        with pytest.raises(DeviceError, match="left something out"):
            rig.stream.run()


def test_steps_beyond_the_limits_are_refused(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Rig(tiny, threads=1) as rig:
        with pytest.raises(CapacityError, match="a step of 9 rows: this artifact has at most 8"):
            rig.set_rows(0, 9, drafted=True)
        with pytest.raises(CapacityError, match="limits.max_model_len is 128"):
            rig.set_rows(127, 2, drafted=False)
    assert main(["bench", "verify", str(tiny), "--context", "500"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("args", [["--rounds", "0"], ["--tokens", "1"], ["--rows", "0"], ["--rows", "x"], ["--threads", "0"],
                                  ["--peer", "llama-bench=/nowhere"], ["--json", "/nowhere/x.json", "--rounds", "1", "--tokens", "2"]])
def test_mistakes_are_one_line(tiny: Path, capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert main(["bench", "decode", str(tiny), *args]) == 2
    assert capsys.readouterr().err.count("\n") == 1
