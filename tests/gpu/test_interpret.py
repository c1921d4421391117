"""A whole model through its GPU program: device `interpret` says what the CPU says, with trees, prompts in chunks and sampling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import ArtifactError, DeviceError
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.targets.triton_checked import DIGESTS, digest
from tests.gpu.tiny import VOCAB
from tests.laws.proposers import Known

PROMPTS = [list(b"one two one two"), list(b"a"), list(b"one two one two, three and four, and all of that once more"), list(b"zz")]
PARAMS = [
    SamplingParams(max_tokens=10, ignore_eos=True),
    SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.8, top_p=0.7, top_k=20, seed=3),
    SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.2, min_p=0.01, seed=4),
    SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.7, top_p=0.9, seed=5, repetition_penalty=1.3, frequency_penalty=0.4,
                   presence_penalty=0.2, min_tokens=5, logprobs=2, logit_bias={65: 2.0}),
]


@dataclass(frozen=True)
class Said:
    texts: list[list[int]]
    logprobs: list[list[tuple[int, float]]]
    accepted: int
    steps: int


def say(engine: Engine) -> Said:
    results = engine.generate(PROMPTS, PARAMS)
    numbers = [[(token.token_id, token.logprob) for token in result.logprobs or ()] for result in results]
    statistics = [result.statistics for result in results]
    accepted = sum(level.accepted for s in statistics for level in s.levels.values())
    return Said([list(result.token_ids) for result in results], numbers, accepted, sum(s.steps for s in statistics))


def with_level(path: Path, level: Level | None, **options: str) -> Said:
    with Engine.load(path, num_pages=40, **options) as engine:
        if level is not None:
            engine.drafting.level = level
        said = say(engine)
        engine.check_integrity()
        return said


@pytest.fixture(scope="module")
def cpu(tiny_cpu: Path) -> Said:
    return with_level(tiny_cpu, None)


@pytest.fixture(scope="module")
def gpu(tiny_gpu: Path, cpu: Said) -> Said:
    """Drafts are random trees that are right about half of the time, so that accepted nodes are committed from the middle of trees."""
    known = Known([prompt + text for prompt, text in zip(PROMPTS, cpu.texts, strict=True)], VOCAB)
    return with_level(tiny_gpu, known.level("trees"), device="interpret")


def test_texts_are_the_cpus(gpu: Said, cpu: Said) -> None:
    assert gpu.texts == cpu.texts


def test_nodes_of_trees_were_accepted(gpu: Said) -> None:
    assert gpu.accepted > 0
    assert gpu.steps < sum(len(text) for text in gpu.texts)


def test_log_probabilities_are_the_cpus(gpu: Said, cpu: Said) -> None:
    assert [[token for token, _ in row] for row in gpu.logprobs] == [[token for token, _ in row] for row in cpu.logprobs]
    for row, expected in zip(gpu.logprobs, cpu.logprobs, strict=True):
        assert [value for _, value in row] == pytest.approx([value for _, value in expected], abs=1e-3)


def test_every_template_of_the_artifact_counts_as_interpreted(tiny_gpu: Path) -> None:
    for target in Artifact.open(tiny_gpu).manifest.targets:
        assert {kernel.checked_by for kernel in target.kernels.values()} == {"interpreted"}


@pytest.mark.parametrize("template", sorted(DIGESTS))
def test_the_record_of_interpreted_templates_is_of_the_present_text(template: str) -> None:
    """When this fails after an edit and the tests above pass, put the new digest into targets/triton_checked.py."""
    assert DIGESTS[template] == digest(template)


def test_a_cpu_artifact_has_nothing_to_interpret(tiny_cpu: Path) -> None:
    with pytest.raises(ArtifactError, match="has no target for a GPU to interpret: run `mlsdc compile ... --target h100`"):
        Engine.load(tiny_cpu, device="interpret")


def test_a_process_that_died_is_an_error_that_says_so(tiny_gpu: Path) -> None:
    with Engine.load(tiny_gpu, num_pages=40, device="interpret") as engine:
        engine.device.worker._process.kill()  # type: ignore[attr-defined]
        with pytest.raises(DeviceError, match="the interpreter's process ended"):
            engine.generate([PROMPTS[1]], PARAMS[0])
