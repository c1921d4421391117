"""One artifact for several machines: the same weights, the best target that fits, the same laws on each."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from mlsdc.compiler import compile_model
from mlsdc.compiler.errors import ConfigError
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from mlsdc.targets import native_target
from tests.once import once

SLOW = "cpu-x86-64"
PROMPT = list(b"one two three, one two three, one two")


@pytest.fixture(scope="module")
def artifact(tiny_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    if platform.machine() != "x86_64":
        pytest.skip("needs an x86-64 machine")
    make = f"hardware=[{SLOW}, cpu-native]"
    folder = once(tmp_path_factory, "two-targets", lambda folder: _ignore(compile_model(tiny_yaml, folder / "tiny.mlsdc", set=[make])))
    return Artifact.open(folder / "tiny.mlsdc")


def _ignore(_: object) -> None:
    return None


def test_the_best_target_stands_first_and_is_picked(artifact: Artifact) -> None:
    assert [target.name for target in artifact.manifest.targets] == [native_target(), SLOW]
    assert artifact.pick_target().name == native_target()
    assert artifact.pick_target(features=frozenset({"sse2"})).name == SLOW


def test_all_targets_read_the_weights_of_one(artifact: Artifact, tiny: Path) -> None:
    assert artifact.manifest.weights == Artifact.open(tiny).manifest.weights


def test_another_architecture_is_refused(artifact: Artifact) -> None:
    with pytest.raises(ArtifactError, match=f"built for {native_target()}, {SLOW}, this machine has .* and lacks sse2: "):
        artifact.pick_target(features=frozenset({"neon", "dotprod", "i8mm"}))


@pytest.mark.parametrize("threads", [1, 2])
def test_speculation_changes_no_token_on_the_slowest_target(artifact: Artifact, threads: int) -> None:
    texts = []
    for speculation in (None, Speculation(enabled=False)):
        with Engine.load(artifact.root, device=SLOW, threads=threads) as engine:
            assert engine.device.name == SLOW
            params = SamplingParams(max_tokens=40, ignore_eos=True, speculation=speculation)
            texts.append([result.token_ids for result in engine.generate([PROMPT, PROMPT[:9]], params)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("hardware", ["[cpu-native, cpu-x86-64-v9]", "cpu-native,cpu-x86-64-v9", "[]", "[1]"])
def test_what_is_not_a_target_is_named(tiny_yaml: Path, tmp_path: Path, hardware: str) -> None:
    with pytest.raises(ConfigError, match="^--set: hardware: .*(cpu-x86-64-v9|expected a target's name)"):
        compile_model(tiny_yaml, tmp_path / "x.mlsdc", set=[f"hardware={hardware}"])
