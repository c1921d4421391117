"""int4 and bf16 weights, from model.yaml to tokens: the whole compile of a tiny model, and drafts that change nothing (laws L1, L2)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.once import once

YAML = """\
target: {{model: {model}, weights: {weights}, kv: {{dtype: bf16, page_size: 16}}}}
cascade: [{{kind: ngram, name: lookup, max_nodes: 7, width: 2}}]
memory: {{kv_pool: 2MiB}}
limits: {{max_model_len: 128, max_num_seqs: 4, max_num_batched_tokens: 64}}
"""


@pytest.fixture(scope="module", params=["int4", "bf16"])
def artifact(request: pytest.FixtureRequest, tiny_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mlsdc.compiler import compile_model

    def make(folder: Path) -> None:
        (folder / "model.yaml").write_text(YAML.format(model=os.path.relpath(tiny_yaml.parent / "tiny", folder), weights=request.param))
        compile_model(folder / "model.yaml", folder / "artifact")

    return once(tmp_path_factory, f"weights-{request.param}", make) / "artifact"


def test_text_is_the_same_with_and_without_drafts_and_neighbours(artifact: Path) -> None:
    from mlsdc.runtime import Engine, SamplingParams
    from mlsdc.runtime.sampling_params import Speculation

    prompts = ["abcabcabcabcab", "the cat sat on the cat sat on", "x"]
    texts = []
    for enabled in (True, False):
        params = SamplingParams(max_tokens=24, ignore_eos=True, speculation=Speculation(enabled))
        with Engine.load(artifact, threads=2) as engine:
            together = engine.generate(prompts, params)
            alone = [engine.generate([prompt], params)[0] for prompt in prompts]
        assert [list(result.token_ids) for result in together] == [list(result.token_ids) for result in alone]
        texts.append([list(result.token_ids) for result in together])
    assert texts[0] == texts[1]


def test_the_manifest_names_the_weights_and_bytes_are_fewer_than_f32s(artifact: Path) -> None:
    from mlsdc.runtime.artifact import Artifact

    manifest = Artifact.open(artifact).manifest
    ((size, _),) = manifest.weights.values()
    table, layers = 4096 * 128, 2 * (4 * 128 * 128 - 2 * 64 * 128 + 3 * 128 * 256)
    bits = {"int4": (8.5, 5.0), "bf16": (16, 16)}[manifest.model.weights_dtype]
    assert size == pytest.approx((table * bits[0] + layers * bits[1]) / 8, rel=0.05)
