"""Hugging Face directories: sharded, bf16, and bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlsdc.compiler.capture import load_source
from mlsdc.compiler.errors import CaptureError
from tests.capture.models import hf_model

TOKENIZER = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": [{"id": 89, "content": "<end>"}]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint in several shards."""
    folder = tmp_path_factory.mktemp("hf") / "tiny-llama"
    hf_model("llama").to(torch.bfloat16).save_pretrained(folder, max_shard_size="50KB")  # type: ignore[operator]
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_every_tensor_is_read_exactly_over_all_shards(directory: Path) -> None:
    assert len(list(directory.glob("*.safetensors"))) > 1
    weights = load_source(str(directory)).weights
    state = hf_model("llama").to(torch.bfloat16).state_dict()
    for name in weights.names():
        assert weights.shape(name) == tuple(state[name].shape)
        assert np.array_equal(weights.read(name), state[name].float().numpy()), name


def test_facts_come_from_their_files(directory: Path) -> None:
    source = load_source(str(directory))
    assert (source.architecture, source.name) == ("llama", "tiny-llama")
    assert source.eos_token_ids == (2, 7)
    assert source.chat_template == "{{ messages }}"


def test_padding_ids_beyond_the_tokenizer_are_not_in_the_vocabulary(directory: Path) -> None:
    source = load_source(str(directory))
    assert (source.num_tokens, source.config["vocab_size"], source.vocab_size) == (90, 96, 90)


def test_nothing_is_quantised(directory: Path) -> None:
    assert load_source(str(directory)).weights.block("model.norm.weight") is None


def test_a_shard_cut_short_is_one_line(directory: Path, tmp_path: Path) -> None:
    shard = sorted(directory.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    @given(st.integers(0, len(data) - 1))
    def cut(size: int) -> None:
        (tmp_path / shard.name).write_bytes(data[:size])
        with pytest.raises(CaptureError, match=rf"^{shard.name}: [^\n]*$"):
            load_source(str(tmp_path))

    cut()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(directory: Path, tmp_path: Path, name: str) -> None:
    for file in directory.iterdir():
        if file.name != name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CaptureError, match=f"{name}: cannot be read: No such file or directory"):
        load_source(str(tmp_path))


@pytest.mark.parametrize(("files", "wanted"), [
    ({"tokenizer_config.json": {"chat_template": "plain"}}, "plain"),
    ({"tokenizer_config.json": {"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]}}, "d"),
    ({"tokenizer_config.json": {"chat_template": "plain"}, "chat_template.json": {"chat_template": "json"}}, "json"),
    ({}, ""),
])
def test_a_chat_template_is_found_wherever_it_stands(directory: Path, tmp_path: Path, files: dict[str, object], wanted: str) -> None:
    for file in directory.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_source(str(tmp_path)).chat_template == wanted


def test_a_tensor_that_the_model_does_not_read_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from mlsdc.compiler.capture.torch_export import capture_model

    hf_model("one-layer").save_pretrained(tmp_path)  # type: ignore[operator]
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    with pytest.raises(CaptureError, match=r"has tensor 'model\.layers\.0\.self_attn\.q_proj\.bias', which the model of its config"):
        capture_model(load_source(str(tmp_path)))


def test_a_shard_that_the_index_names_but_is_not_there_is_named(directory: Path, tmp_path: Path) -> None:
    gone = sorted(directory.glob("*.safetensors"))[0]
    for file in directory.iterdir():
        if file != gone:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CaptureError, match=f"^{gone.name}: cannot be read"):
        load_source(str(tmp_path))
