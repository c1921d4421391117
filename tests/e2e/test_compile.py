"""The whole compile: the same bytes twice, the same text whatever the passes, everything the manifest promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlsdc.compiler import compile_model
from mlsdc.compiler.pack import hash_files
from mlsdc.compiler.text import parse_graph
from mlsdc.runtime import Artifact, Engine, SamplingParams

PROMPTS = ["the cat and the dog and the cat", "0101010101", "z"]


def ids(artifact: Path) -> list[list[int]]:
    with Engine.load(artifact, threads=1) as engine:
        return [result.token_ids for result in engine.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))]


def test_same_inputs_give_the_same_bytes(tiny: Path, tiny_yaml: Path, tmp_path: Path) -> None:
    """In another process, folder and hash seed."""
    code = f"from mlsdc.compiler import compile_model; compile_model({str(tiny_yaml)!r}, 'again.mlsdc')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert hash_files(tmp_path / "again.mlsdc") == hash_files(tiny)


@pytest.mark.parametrize("name", ["fuse-attention"])
def test_artifact_without_a_fusion_gives_the_same_text(tiny: Path, tiny_yaml: Path, tmp_path: Path, name: str) -> None:
    compile_model(tiny_yaml, tmp_path / "plain.mlsdc", set=[f"passes.disable=[{name}]"])
    assert ids(tmp_path / "plain.mlsdc") == ids(tiny)


def test_dump_shows_attention_before_and_after_its_fusion_and_every_pass_validates(tiny_yaml: Path, tmp_path: Path) -> None:
    compile_model(tiny_yaml, tmp_path / "a.mlsdc", dump_ir=tmp_path / "dump", verify_each=True)
    unfused, fused = (next((tmp_path / "dump").glob(f"*-{name}.ir")).read_text() for name in ("quantise-weights", "fuse-attention"))
    for op in ("dequantise", "matmul_qk", "mask", "softmax", "matmul_pv"):
        assert f" = {op}(" in unfused
        assert f" = {op}(" not in fused
    assert fused.count(" = paged_attention(") == 2


def test_every_file_is_in_the_manifest(tiny: Path) -> None:
    manifest = Artifact.open(tiny).manifest
    assert {*manifest.files, *manifest.weights, "manifest.json"} == set(hash_files(tiny))


def test_no_file_names_this_machine(tiny: Path, tiny_yaml: Path) -> None:
    for path in tiny.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert str(tiny_yaml.parent).encode() not in data, path
            assert str(tiny).encode() not in data, path


def test_graph_in_the_artifact_parses(tiny: Path) -> None:
    graph = parse_graph((tiny / "graph" / "target.ir").read_text())
    assert dict(graph.outputs).keys() == {"logits", "choices", "kv"}


def test_padded_vocabulary_is_never_chosen(tiny: Path) -> None:
    assert Artifact.open(tiny).manifest.model.vocab_size == 256
    assert all(token < 256 for text in ids(tiny) for token in text)


@pytest.mark.model
def test_embedding_example_answers(smollm2: Path, root: Path) -> None:
    done = subprocess.run([sys.executable, str(root / "examples" / "embed.py"), str(smollm2)], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
