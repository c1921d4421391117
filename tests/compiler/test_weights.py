"""Reading weights: stored blocks keep what they mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlsdc.compiler.capture.source import Blocks
from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Node, Weight
from mlsdc.compiler.quantise import Q4, quantise_q4, quantise_q8
from mlsdc.compiler.types import DType, TensorType
from mlsdc.compiler.weights import q8_on_grid, read_weight


class Source:
    """A checkpoint of plain f32 tensors and, for some, their stored blocks."""

    def __init__(self, tensors: dict[str, np.ndarray], blocks: dict[str, Blocks] | None = None) -> None:
        self.tensors, self.blocks = tensors, blocks or {}

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def block(self, name: str) -> Blocks | None:
        return self.blocks.get(name)


def noise(seed: int, n: int, k: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, k)).astype(np.float32)


def weight(dtype: DType, *shape: int, sources: tuple[str, ...] = ("a",)) -> Node:
    return Node("w", Weight(sources), (), TensorType(dtype, shape))


def test_sources_are_stacked_in_order() -> None:
    source = Source({"a": noise(0, 2, 32), "b": noise(1, 3, 32)})
    stacked = read_weight(weight(DType.F32, 5, 32, sources=("a", "b")), source)
    assert np.array_equal(stacked, np.concatenate([source.tensors["a"], source.tensors["b"]]))


def test_stacked_q8_is_each_source_quantised() -> None:
    source = Source({"a": noise(0, 2, 64), "b": noise(1, 3, 64)})
    packed = read_weight(weight(DType.Q8, 5, 64, sources=("a", "b")), source)
    for name, part in (("a", packed[:2]), ("b", packed[2:])):
        alone = quantise_q8(source.tensors[name])
        assert np.array_equal(part.codes, alone.codes)
        assert np.array_equal(part.scales, alone.scales)


def test_q8_0_blocks_keep_codes_and_scales() -> None:
    alone = quantise_q8(noise(0, 2, 64))
    raw = np.concatenate([alone.scales.reshape(-1, 1).view(np.uint8), alone.codes.reshape(-1, 32).view(np.uint8)], axis=1)
    source = Source({"a": np.zeros((2, 64), np.float32)}, {"a": Blocks("Q8_0", (2, 64), raw.reshape(2, -1))})
    packed = read_weight(weight(DType.Q8, 2, 64), source)
    assert np.array_equal(packed.codes, alone.codes)
    assert np.array_equal(packed.scales, alone.scales)


@given(st.integers(0, 2**32), st.floats(-3, 3), st.floats(1e-3, 1e3))
def test_q4_on_its_grid_is_closer_than_quantised_afresh(seed: int, centre: float, spread: float) -> None:
    q4 = quantise_q4((noise(seed, 8, 256) + np.float32(centre)) * np.float32(spread))
    exact = q4.dequantise()
    on_grid, afresh = (np.square(q.dequantise() - exact).sum() for q in (q8_on_grid(q4), quantise_q8(exact)))
    assert on_grid <= afresh


def test_groups_of_one_value_are_quantised_too() -> None:
    q4 = Q4(np.zeros((1, 32), np.uint8), np.zeros((1, 1), np.float16), np.full((1, 1), 0.5, np.float16))
    assert np.allclose(q8_on_grid(q4).dequantise(), 0.5, rtol=1e-3)


def test_zeros_stay_zeros() -> None:
    q4 = Q4(np.zeros((1, 32), np.uint8), np.zeros((1, 1), np.float16), np.zeros((1, 1), np.float16))
    assert not q8_on_grid(q4).dequantise().any()


def q4_0(seed: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray, Blocks]:
    """(scales f16[n, k / 32], codes u8[n, k], the same as Q4_0 blocks); some scales are negative, as llama.cpp's are."""
    rng = np.random.default_rng(seed)
    scales = rng.normal(size=(n, k // 32)).astype(np.float16)
    codes = rng.integers(0, 16, (n, k), np.uint8)
    halves = codes.reshape(-1, 2, 16)
    raw = np.concatenate([scales.reshape(-1, 1).view(np.uint8), halves[:, 0] | halves[:, 1] << 4], axis=1)
    return scales, codes, Blocks("Q4_0", (n, k), raw.reshape(n, -1))


def test_q4_0_blocks_become_q4_and_q8_of_the_same_values() -> None:
    scales, codes, blocks = q4_0(0, 3, 64)
    exact = np.repeat(scales.astype(np.float32), 32, axis=1) * (codes.astype(np.float32) - 8)
    source = Source({"a": exact}, {"a": blocks})
    for dtype in (DType.Q4, DType.Q8):
        packed = read_weight(weight(dtype, 3, 64), source)
        assert np.array_equal(packed.dequantise(), exact)
        assert np.array_equal(packed.scales, scales)


def test_q4_1_blocks_keep_codes_scales_and_minima_in_q4() -> None:
    alone = quantise_q4(noise(0, 2, 64))
    halves = alone.codes.reshape(-1, 2, 16)
    factors = np.stack([alone.scales, alone.mins], -1).reshape(-1, 2).view(np.uint8)
    raw = np.concatenate([factors, halves[:, 0] | halves[:, 1] << 4], axis=1)
    source = Source({"a": alone.dequantise()}, {"a": Blocks("Q4_1", (2, 64), raw.reshape(2, -1))})
    packed = read_weight(weight(DType.Q4, 2, 64), source)
    for field in ("codes", "scales", "mins"):
        assert np.array_equal(getattr(packed, field), getattr(alone, field))


def test_values_that_the_scales_cannot_hold_are_refused_by_name() -> None:
    for dtype in (DType.Q4, DType.Q8):
        with np.errstate(over="ignore"), pytest.raises(CompileError, match="%w: has values too large for the f16 scales"):
            read_weight(weight(dtype, 1, 32), Source({"a": np.full((1, 32), 1e9, np.float32) * np.arange(32)}))
