"""An artifact is checked before anything in it is used (laws L6, L7)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.manifest import KernelInfo, LevelInfo, Manifest, ModelInfo, Plan, TargetInfo, seal
from mlsdc.runtime.program import ProgramSpec
from mlsdc.runtime.safetensors import header_sha256
from mlsdc.runtime.step import Limits

WEIGHTS = "weights/target.safetensors"
KERNEL = "kernels/cpu-fast/k.so"
PROGRAM = "program/target.forward.json"


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build(root: Path, **changes: Any) -> Path:
    """A small artifact that opens; `changes` replace manifest fields."""
    program = ProgramSpec("forward", "target", 0, (), {}).to_json()
    for name, text in {KERNEL: "code", PROGRAM: program, "tokenizer.json": "{}"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    header = json.dumps({"w": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    header += b" " * (-(8 + len(header)) % 64)
    (root / "weights").mkdir()
    (root / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    kernel = KernelInfo("k", KERNEL, KERNEL, (), "ran")
    targets = (
        TargetInfo("cpu-fast", "cpu", ("avx512f", "avx512vnni"), (KERNEL,), {"k": kernel}),
        TargetInfo("cpu-slow", "cpu", ("avx2",), (), {}),
        TargetInfo("h100", "cuda", ("sm_90",), (), {}),
    )
    levels = (
        LevelInfo("ngram", "ngram", {"order": 4}),
        LevelInfo("target", "target", {}, KvGeometry("bf16", 16, 2, 1, 16), WEIGHTS, {"cpu-fast": {"forward": PROGRAM}}),
    )
    manifest = Manifest(
        ModelInfo("m", "llama", 10, 8, 2, None, (2,), "int8", "tests"), Limits(64, 4, 16, 16, 8), levels, targets, Plan(8, 4),
        {name: sha(root / name) for name in (KERNEL, PROGRAM, "tokenizer.json")},
        {WEIGHTS: ((root / WEIGHTS).stat().st_size, sha(root / WEIGHTS))},
        {WEIGHTS: header_sha256(root / WEIGHTS)}, {"mlsdc": "0"})
    (root / "manifest.json").write_text(replace(manifest, **changes).to_json())
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "m.mlsdc").mkdir()
    return build(tmp_path / "m.mlsdc")


def edit(root: Path, change: Any) -> None:
    raw = json.loads((root / "manifest.json").read_text())
    change(raw)
    (root / "manifest.json").write_text(seal(raw))


def test_an_untouched_artifact_opens_and_verifies(root: Path) -> None:
    artifact = Artifact.open(root)
    assert artifact.verify() == sorted([KERNEL, PROGRAM, "tokenizer.json", WEIGHTS])
    assert artifact.weights("target").tensor("w").shape == (64,)
    assert artifact.programs("target", artifact.manifest.targets[0])["forward"].level == "target"


def test_the_manifest_comes_back_as_it_was_written(root: Path) -> None:
    text = (root / "manifest.json").read_text()
    assert Manifest.from_json(text, "m").to_json() == text


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(ArtifactError, match="nowhere: no such artifact folder"):
        Artifact.open("nowhere")


def test_a_folder_without_a_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no manifest\.json"):
        Artifact.open(tmp_path)


@pytest.mark.parametrize("name", [KERNEL, PROGRAM, "tokenizer.json"])
def test_an_edited_file_is_named(root: Path, name: str) -> None:
    (root / name).write_bytes((root / name).read_bytes()[:-1] + b"!")
    with pytest.raises(ArtifactError, match=f"{name}: sha256 .* it was edited"):
        Artifact.open(root)


@pytest.mark.parametrize("name", [KERNEL, PROGRAM, WEIGHTS])
def test_a_missing_file_is_named(root: Path, name: str) -> None:
    (root / name).unlink()
    with pytest.raises(ArtifactError, match=f"{name}: missing"):
        Artifact.open(root)


def test_weights_cut_short_are_found_at_load(root: Path) -> None:
    (root / WEIGHTS).write_bytes((root / WEIGHTS).read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="it is cut short"):
        Artifact.open(root)


def test_another_weight_header_is_found_at_load(root: Path) -> None:
    data = (root / WEIGHTS).read_bytes()
    (root / WEIGHTS).write_bytes(data.replace(b'"w"', b'"v"'))
    with pytest.raises(ArtifactError, match="header is not the one"):
        Artifact.open(root)


def test_a_flipped_weight_is_found_by_verify(root: Path) -> None:
    data = (root / WEIGHTS).read_bytes()
    (root / WEIGHTS).write_bytes(data[:-1] + b"\x01")
    artifact = Artifact.open(root)
    with pytest.raises(ArtifactError, match=f"{WEIGHTS}: sha256"):
        artifact.verify()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"format": 2}', "\x00"])
def test_a_damaged_manifest_is_one_clear_line(root: Path, text: str) -> None:
    (root / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"manifest\.json: not a manifest"):
        Artifact.open(root)


def test_a_manifest_cut_anywhere_is_refused(root: Path) -> None:
    text = (root / "manifest.json").read_text()
    for size in range(0, len(text) - 2, 97):
        (root / "manifest.json").write_text(text[:size])
        with pytest.raises(ArtifactError, match="not a manifest"):
            Artifact.open(root)


PLANS: dict[str, Any] = {
    "page size": lambda raw: raw["levels"][1]["kv"].update(page_size=32),
    "format": lambda raw: raw["levels"][1]["kv"].update(format="int8"),
    "layers": lambda raw: raw["levels"][1]["kv"].update(num_layers=1), "heads": lambda raw: raw["levels"][1]["kv"].update(num_kv_heads=2),
    "heads that are no number": lambda raw: raw["levels"][1]["kv"].update(num_kv_heads="1"),
    "head size": lambda raw: raw["levels"][1]["kv"].update(head_dim=32), "sequences": lambda raw: raw["limits"].update(max_num_seqs=8),
    "context": lambda raw: raw["limits"].update(max_model_len=128), "vocabulary": lambda raw: raw["model"].update(vocab_size=20),
    "digest": lambda raw: raw.update(digest="0" * 64), "no digest": lambda raw: raw.pop("digest"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_its_kernels_were_not_built_for_is_refused(root: Path, name: str) -> None:
    """Each is a value that could be true; pages and buffers of that size would be read beyond their end."""
    raw = json.loads((root / "manifest.json").read_text())
    PLANS[name](raw)
    (root / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(ArtifactError, match=r"manifest\.json: (it was edited|not a manifest)") as caught:
        Artifact.open(root)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_refused(root: Path) -> None:
    (root / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ArtifactError, match="cannot be read"):
        Artifact.open(root)


def test_another_format_number_says_what_to_do(root: Path) -> None:
    edit(root, lambda raw: raw.update(format=99))
    with pytest.raises(ArtifactError, match="format 99, this runtime reads format 2: run `mlsdc compile` again"):
        Artifact.open(root)


@pytest.mark.parametrize(("change", "what"), [
    (lambda raw: raw["targets"][0].pop("exact"), "KeyError: 'exact'"), (lambda raw: raw["levels"][0].update(new=1), "TypeError: .*new")])
def test_a_whole_manifest_of_other_fields_is_another_versions(root: Path, change: Any, what: str) -> None:
    edit(root, change)
    with pytest.raises(ArtifactError, match=rf"another version of mlsdc wrote it \({what}.*\): run `mlsdc compile` again"):
        Artifact.open(root)


@pytest.mark.parametrize("value", [0, -1, "8", None, 1.5, True])
def test_limits_that_are_no_sizes_are_refused(root: Path, value: object) -> None:
    edit(root, lambda raw: raw["limits"].update(max_num_seqs=value))
    with pytest.raises(ArtifactError, match="max_num_seqs"):
        Artifact.open(root)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "", "..\\secret"])
def test_paths_never_lead_out_of_the_folder(root: Path, name: str) -> None:
    (root.parent / "secret").write_text("s")
    edit(root, lambda raw: raw["files"].update({name: "0"}))
    with pytest.raises(ArtifactError, match="is not a path inside the artifact"):
        Artifact.open(root)


def test_links_never_lead_out_of_the_folder(root: Path) -> None:
    (root.parent / "secret").write_text("code")
    (root / KERNEL).unlink()
    (root / KERNEL).symlink_to(root.parent / "secret")
    with pytest.raises(ArtifactError, match="leads out of the artifact"):
        Artifact.open(root)


def test_code_without_a_hash_is_never_loaded(root: Path) -> None:
    edit(root, lambda raw: raw["files"].pop(KERNEL))
    with pytest.raises(ArtifactError, match="is used but has no hash"):
        Artifact.open(root)


def test_the_first_target_that_fits_is_picked(root: Path) -> None:
    artifact = Artifact.open(root)
    assert artifact.pick_target(features=frozenset({"avx2", "avx512f", "avx512vnni"})).name == "cpu-fast"
    assert artifact.pick_target(features=frozenset({"avx2"})).name == "cpu-slow"


def test_a_target_can_be_asked_for_by_name(root: Path) -> None:
    features = frozenset({"avx2", "avx512f", "avx512vnni"})
    assert Artifact.open(root).pick_target("cpu-slow", features).name == "cpu-slow"


def test_a_machine_that_is_too_old_is_told_what_it_lacks(root: Path) -> None:
    with pytest.raises(ArtifactError, match=r"built for cpu-fast, this machine has .* lacks avx512vnni: run `mlsdc targets`"):
        Artifact.open(root).pick_target("cpu-fast", frozenset({"avx512f"}))


def test_a_device_it_was_not_built_for_is_named(root: Path) -> None:
    with pytest.raises(ArtifactError, match="device 'rocm' was asked for"):
        Artifact.open(root).pick_target("rocm")
