"""A compile whose cache format loses more than quality_gate allows ends with the figures and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.compiler import compile_model
from mlsdc.compiler.config import Config, GateConfig, parse_config
from mlsdc.compiler.errors import CompileError, ConfigError
from mlsdc.compiler.quality_gate import misses
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.bench.quality import Quality

FOUND = Quality("int8", "a", "00", 100, 10.0, 0.02, 0.005, 0.1, 0.96, {}, float("nan"))


def test_a_loss_beyond_the_gate_is_refused_and_one_within_it_is_not(tiny_yaml: Path, tmp_path: Path) -> None:
    output = tmp_path / "m.mlsdc"
    with pytest.raises(CompileError, match="quality_gate: int8 loses too much: KL .*, at most 1e-12 is allowed; over .* rows") as caught:
        compile_model(tiny_yaml, output, set=["target.kv=int8", "quality_gate={kl: 1e-12, tokens: 100}"])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    compile_model(tiny_yaml, output, set=["target.kv=int8", "quality_gate={kl: 0.1, perplexity: 0.5, top1: 0.5, tokens: 100}"])
    assert Artifact.open(output).manifest.target_level.kv.format == "int8"  # type: ignore[union-attr]


@pytest.mark.parametrize(("gate", "messages"), [
    (GateConfig(kl=0.005, perplexity=0.02, top1=0.96), []),
    (GateConfig(kl=0.004), ["KL 0.005, at most 0.004 is allowed"]),
    (GateConfig(perplexity=0.01, top1=0.97), ["perplexity +2.00%, at most +1.00% is allowed", "top-1 agreement 96.00%, at least 97.00%"]),
])
def test_every_missed_bound_is_told(gate: GateConfig, messages: list[str]) -> None:
    found = list(misses(gate, FOUND))
    assert len(found) == len(messages)
    assert all(message in line for message, line in zip(messages, found, strict=True))


def test_a_kl_that_is_no_number_is_a_miss() -> None:
    broken = Quality("int8", "a", "00", 100, 10.0, float("nan"), float("nan"), 0.1, 0.96, {}, 1.0)
    assert len(list(misses(GateConfig(kl=1.0, perplexity=1.0), broken))) == 2


def parsed(gate: object) -> Config:
    return parse_config({"target": {"model": "m"}, "quality_gate": gate})


@pytest.mark.parametrize(("gate", "message"), [
    ({}, "config: quality_gate: has no bound; give kl, perplexity or top1"),
    ({"kl": -1}, "config: quality_gate.kl: -1.0 is out of range; at least 0.0 is allowed"),
    ({"kld": 1}, "config: quality_gate.kld: unknown key"),
    ({"kl": "low"}, "config: quality_gate.kl: expected a number"),
])
def test_a_wrong_gate_is_one_line(gate: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(gate)
    assert str(caught.value).startswith(message)


def test_no_gate_is_no_gate() -> None:
    assert parsed(None).quality_gate is None
    assert parsed({"kl": 0.01}).quality_gate == GateConfig(kl=0.01)
