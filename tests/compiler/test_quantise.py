"""q8, q4 and a8 as numbers, and GGUF's blocks as the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mlsdc.compiler import quantise as module
from mlsdc.compiler.quantise import Q4, Q8, linear_q, q4_from_gguf, q8_from_gguf, quantise_a8, quantise_q4, quantise_q8

VALUES = arrays(np.float32, (3, 64), elements=st.floats(-100, 100, width=32))
RANDOM = np.random.default_rng(0)


@given(VALUES)
def test_q8_is_within_half_a_step(w: np.ndarray) -> None:
    q = quantise_q8(w)
    step = np.repeat(np.abs(w.reshape(3, 2, 32)).max(-1) / 127, 32, axis=-1)
    # Half a step, the f16 scale's own rounding at 127 steps, and f16's smallest scale.
    assert (np.abs(q.dequantise() - w) <= step * (0.5 + 127 * 2**-11) + 127 * 2**-24).all()


@given(VALUES)
def test_a8_is_within_half_a_step(x: np.ndarray) -> None:
    step = np.repeat(np.abs(x.reshape(3, 2, 32)).max(-1) / 127, 32, axis=-1)
    assert (np.abs(quantise_a8(x).dequantise() - x) <= step * 0.50001 + 1e-30).all()


@given(VALUES)
def test_q4_is_within_half_a_step(w: np.ndarray) -> None:
    groups = w.reshape(3, 2, 32)
    span = np.repeat(groups.max(-1) - groups.min(-1), 32, axis=-1)
    most = np.repeat(np.abs(groups).max(-1), 32, axis=-1)
    assert (np.abs(quantise_q4(w).dequantise() - w) <= span / 30 + (span + most) * 2**-9 + 16 * 2**-24).all()


def test_a_group_of_zeros_is_zeros() -> None:
    zeros = np.zeros((2, 32), np.float32)
    assert not quantise_q8(zeros).codes.any()
    assert not quantise_a8(zeros).scales.any()
    assert not quantise_q4(zeros).dequantise().any()


@pytest.mark.parametrize("quantise", [quantise_q8, quantise_q4])
@pytest.mark.parametrize("block", [1, 64, 192, 1 << 20])
def test_some_rows_at_a_time_are_all_rows_at_once(
        quantise: Callable[[np.ndarray], Q8 | Q4], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = RANDOM.standard_normal((7, 64)).astype(np.float32)
    monkeypatch.setattr(module, "BLOCK", block)
    found, wanted = quantise(w), quantise.__wrapped__(w)  # type: ignore[attr-defined]
    for name, values in vars(wanted).items():
        assert np.array_equal(getattr(found, name), values)
        assert getattr(found, name).dtype == values.dtype


def test_rounding_is_to_nearest_even() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :4] = 127, 0.5, 1.5, -2.5
    assert quantise_a8(x).codes[0, :4].tolist() == [127, 0, 2, -2]


def test_quantising_dequantised_q8_changes_nothing() -> None:
    q = quantise_q8(RANDOM.standard_normal((8, 64)).astype(np.float32))
    again = quantise_q8(q.dequantise())
    assert np.array_equal(again.codes, q.codes)
    assert np.array_equal(again.scales, q.scales)


@pytest.mark.parametrize("quantise", [quantise_q8, quantise_q4])
def test_linear_q_is_the_product_of_what_the_numbers_mean(quantise: object) -> None:
    h = quantise_a8(RANDOM.standard_normal((5, 96)).astype(np.float32))
    w = quantise(RANDOM.standard_normal((7, 96)).astype(np.float32))  # type: ignore[operator]
    wanted = h.dequantise().astype(np.float64) @ w.dequantise().astype(np.float64).T
    np.testing.assert_allclose(linear_q(h, w), wanted, rtol=1e-5, atol=1e-5)


def test_linear_q_does_not_depend_on_the_other_rows() -> None:
    h = quantise_a8(RANDOM.standard_normal((8, 96)).astype(np.float32))
    w = quantise_q8(RANDOM.standard_normal((64, 96)).astype(np.float32))
    assert all(np.array_equal(linear_q(type(h)(h.codes[i : i + 1], h.scales[i : i + 1]), w)[0], linear_q(h, w)[i]) for i in range(8))


@pytest.mark.parametrize(("name", "read"), [("Q8_0", q8_from_gguf), ("Q4_1", q4_from_gguf)])
def test_gguf_blocks_mean_the_same(name: str, read: object) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name]
    blocks = gguf.quantize(RANDOM.standard_normal((4, 64)).astype(np.float32), kind)
    assert np.array_equal(read(blocks, (4, 64)).dequantise(), gguf.dequantize(blocks, kind))  # type: ignore[operator]


def test_columns_that_are_no_multiple_of_32_are_refused() -> None:
    with pytest.raises(ValueError, match="last axis is 33, expected a multiple of 32"):
        quantise_q8(np.zeros((1, 33), np.float32))
