"""KV formats: what is written comes back, slots do not touch each other, and errors say what was found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.kv_format import FORMATS, KvGeometry, format_text, parse_format
from mlsdc.runtime.kv_numbers import from_e4m3, rotate, to_e4m3
from mlsdc.runtime.kv_tail import Tail

PER_TOKEN = [name for name, kv in FORMATS.items() if not kv.grouped]
GROUPED = {"int4": 1 / 14, "int3": 1 / 6.8, "int2": 1 / 2.9}
# largest error, relative to the largest |x| of a token, both as they are quantised: rotated, where the format is
STEP = {"bf16": 2**-8, "int8": 1 / 253, "int8n": 1 / 253, "fp8": 2**-4, "int4-token": 1 / 14}


@pytest.mark.parametrize("name", PER_TOKEN)
@given(seed=st.integers(0, 2**32), page=st.sampled_from([16, 32, 64]), dim=st.sampled_from([16, 64, 80, 96, 112, 128, 256]))
@settings(max_examples=15)
def test_a_token_comes_back_within_its_formats_step(name: str, seed: int, page: int, dim: int) -> None:
    rng = np.random.default_rng(seed)
    geometry = KvGeometry(name, page, 2, 2, dim)
    bytes_ = np.full(geometry.page_bytes, 0xFF, np.uint8)
    tokens = rng.standard_normal((2, page, dim), np.float32) * np.exp2(rng.integers(-8, 8, (2, page, 1)))
    for slot in rng.permutation(page):
        geometry.write(bytes_, 1, 1, int(slot), *tokens[:, slot].astype(np.float32))
    blocks = geometry.kv.keys, geometry.kv.values
    for block, x, found in zip(blocks, tokens, geometry.read(bytes_, 1, 1), strict=True):
        x, found = (rotate(x), rotate(found)) if block.rotated else (x, found)
        assert (np.abs(found - x) <= STEP[name] * np.abs(x).max(axis=1, keepdims=True)).all()


@pytest.mark.parametrize("name", PER_TOKEN)
def test_writing_a_slot_changes_no_other_token_and_no_other_head(name: str) -> None:
    rng = np.random.default_rng(0)
    geometry = KvGeometry(f"{name}@0=bf16", 32, 3, 2, 80)
    page = rng.integers(0, 100, geometry.page_bytes, np.uint8)
    blocks = [(layer, head) for layer in range(3) for head in range(2)]
    before = page.copy()
    geometry.write(page, 1, 1, 5, *rng.standard_normal((2, 80), np.float32))
    for at in blocks:
        for new, old in zip(geometry.blocks(page, *at), geometry.blocks(before, *at), strict=True):
            assert at == (1, 1) or np.array_equal(new, old)
    others = [slot for slot in range(32) if slot != 5]
    for new, old in zip(geometry.read(page, 1, 1), geometry.read(before, 1, 1), strict=True):
        assert np.array_equal(new[others], old[others], equal_nan=True)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_zeros_come_back_as_zeros(name: str) -> None:
    geometry = KvGeometry(name, 16, 1, 1, 64)
    page = np.full(geometry.page_bytes, 0xFF, np.uint8)
    for slot in range(16):
        geometry.write(page, 0, 0, slot, *np.zeros((2, 64), np.float32))
    assert not any(x.any() for x in geometry.read(page, 0, 0))


@pytest.mark.parametrize("name", GROUPED)
@given(seed=st.integers(0, 2**32), page=st.sampled_from([16, 32, 64]), dim=st.sampled_from([16, 64, 80, 96, 112, 128, 256]))
@settings(max_examples=15)
def test_a_group_comes_back_within_its_formats_step(name: str, seed: int, page: int, dim: int) -> None:
    rng = np.random.default_rng(seed)
    geometry = KvGeometry(name, page, 2, 2, dim)
    bytes_ = np.full(geometry.page_bytes, 0xFF, np.uint8)
    keys = rng.standard_normal((page, dim), np.float32)
    values = rng.standard_normal((page, dim), np.float32)
    geometry.write_group(bytes_, 1, 1, keys, values)
    for x, found in zip((keys, values), geometry.read(bytes_, 1, 1), strict=True):
        spread = np.abs(rotate(x)).max() * 2
        assert (np.abs(rotate(found) - rotate(x)) <= GROUPED[name] * spread).all()


def test_a_grouped_geometry_says_what_lies_in_16_bits() -> None:
    geometry = KvGeometry("int4@2=bf16", 64, 3, 2, 80)
    assert geometry.tail == Tail(recent=32, group=64, page_size=16)
    assert geometry.wide == KvGeometry("bf16", 16, 3, 2, 80)
    assert geometry.tail is not None
    assert (geometry.tail.sinks, geometry.tail.recent, geometry.tail.slots, geometry.tail.num_pages) == (16, 32, 96, 7)
    plain = KvGeometry("int8", 64, 3, 2, 80)
    assert (plain.tail, plain.wide) == (None, None)


def test_int4_and_int2_are_as_small_as_promised() -> None:
    """Bytes at 4096 tokens against bf16, the first tokens and the tail of R + G tokens included."""

    def share(name: str, page: int) -> float:
        geometry, plain = (KvGeometry(format_, page, 30, 3, 64) for format_ in (name, "bf16"))
        tail = geometry.tail.num_pages * geometry.wide.page_bytes if geometry.tail and geometry.wide else 0
        return (4096 * geometry.bytes_per_token + tail) / (4096 * plain.bytes_per_token)

    assert share("int8", 32) <= 0.52
    assert share("int4", 32) <= 0.33
    assert share("int4", 64) <= 0.31
    assert share("int2", 32) <= 0.22


def test_bits_of_an_element_are_those_of_the_bytes() -> None:
    bits = {name: kv.bits_per_element(32, 64) for name, kv in FORMATS.items()}
    assert bits == {"bf16": 16, "int8": 8.25, "int8n": 8.25, "fp8": 8.25, "int4-token": 4.5, "int4": 4.75, "int3": 3.75, "int2": 2.75}


def test_every_layer_starts_on_a_cache_line_whatever_its_format() -> None:
    for name in ("int8", "int8/int4-token@1=bf16", "int4-token@0.2=fp8"):
        for page, dim in ((16, 80), (32, 64), (64, 112)):
            geometry = KvGeometry(name, page, 3, 3, dim)
            assert all(geometry.k_offset(layer, head) % 64 == 0 for layer in range(3) for head in range(3))
            assert geometry.page_bytes % 64 == 0


def test_e4m3_keeps_its_own_numbers_and_rounds_ties_to_even() -> None:
    codes = np.arange(127, dtype=np.uint8)
    values = from_e4m3(codes)
    assert np.array_equal(to_e4m3(values), codes)
    between = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    assert np.array_equal(to_e4m3(between), codes[:-1] + codes[:-1] % 2)
    assert to_e4m3(np.float32([1e9, -1e9])).tolist() == [126, 254]


@given(others=st.dictionaries(st.integers(0, 40), st.sampled_from(["bf16", "fp8", "int8/fp8"])), name=st.sampled_from(["int8", "fp8/bf16"]))
def test_a_levels_formats_are_one_text_and_back(others: dict[int, str], name: str) -> None:
    kv, found = parse_format(format_text(name, others))
    assert kv.name == name
    assert {layer: other.name for layer, other in found.items()} == others


@pytest.mark.parametrize(("text", "said"), [
    ("int9", "kv format: 'int9' is not known; formats are bf16, int8, fp8"), ("int8/x", "kv format: 'x' is not known"),
    ("int8@bf16", "'int8@bf16': expected layers and a format such as @0.29=bf16, found '@bf16'"),
    ("int8@1=bf16@1=fp8", "gives layer 1 two formats"), ("int8@3=bf16", "'int8@3=bf16' names layer 3, there are 3"),
])
def test_what_is_no_format_is_said_in_one_line(text: str, said: str) -> None:
    with pytest.raises(MlsdcError, match=r"^[^\n]+$") as caught:
        KvGeometry(text, 16, 3, 1, 64)
    assert said in str(caught.value)
