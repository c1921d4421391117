"""The one definition of q8, q4, f8 and a8: what a quantised number *means*. Packers, the interpreter and kernel tests share it.

Groups of 32 run along the last axis. `codes` keep the logical shape; `scales` (and `mins`) have one entry a group.

    q8   w = scale * q            scale = f16(max|w| / 127)     q = round(w / scale), clipped to -127..127
    q4   w = scale * q + min      scale = f16((max - min) / 15) q = round((w - min) / scale), clipped to 0..15, min = f16(min w)
    f8   w = scale * e4m3         scale = f32(max|w| / 448) of the row, no groups; the nearest e4m3, ties to even
    a8   x = scale * q            scale = max|x| * f32(1/127)   q = round(x * (127 / max|x|))
    a16  x = high + low           high = a8 of x                low = a8 of fma(-scale, q, x), in the groups of `fine` only

Rounding is to nearest even, a group of zeros has scale 0 and codes 0, and all arithmetic is f32 with the rounded scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.types import GROUP
from mlsdc.runtime.kv_numbers import from_e4m3, to_e4m3

Array: TypeAlias = npt.NDArray[Any]
T = TypeVar("T")
BLOCK = 1 << 18  # numbers that are quantised at a time
TINY = np.float32(1e-30)  # a group of activations below it counts as zeros: 127 / max|x| must stay finite
Q4_0_BYTES = 18  # f16 scale, 16 bytes of nibbles as in Q4_1; w = scale * (q - 8)
Q4_1_BYTES = 20  # f16 scale, f16 min, 16 bytes of nibbles: element i low, element i + 16 high
Q8_0_BYTES = 34  # f16 scale, 32 int8
INT4_BYTES = 19  # f16 scale, u8 zero point, 16 bytes of nibbles as in Q4_1; w = scale * (q - zero)
F8_BYTES = 36  # f32 scale, the same in every group of a row, 32 e4m3
F8_MAX = 448.0


@dataclass(frozen=True, eq=False)
class Q8:
    """codes i8[n, k], scales f16[n, k / 32]."""

    codes: Array
    scales: Array

    def dequantise(self) -> Array:
        """f32[n, k]"""
        return spread(self.scales) * self.codes.astype(np.float32)

    def __getitem__(self, rows: Any) -> Q8:
        return Q8(self.codes[rows], self.scales[rows])


@dataclass(frozen=True, eq=False)
class Q4:
    """codes u8[n, k] in 0..15, scales and mins f16[n, k / 32]."""

    codes: Array
    scales: Array
    mins: Array

    def dequantise(self) -> Array:
        """f32[n, k]"""
        return spread(self.scales) * self.codes.astype(np.float32) + spread(self.mins)

    def __getitem__(self, rows: Any) -> Q4:
        return Q4(self.codes[rows], self.scales[rows], self.mins[rows])


@dataclass(frozen=True, eq=False)
class F8:
    """codes u8[n, k], the bits of e4m3; scales f32[n]."""

    codes: Array
    scales: Array

    def dequantise(self) -> Array:
        """f32[n, k]"""
        return from_e4m3(self.codes) * self.scales[:, None]

    def __getitem__(self, rows: Any) -> F8:
        return F8(self.codes[rows], self.scales[rows])


@dataclass(frozen=True, eq=False)
class A8:
    """codes i8[rows, k], scales f32[rows, k / 32]."""

    codes: Array
    scales: Array

    def dequantise(self) -> Array:
        """f32[rows, k]"""
        return spread(self.scales) * self.codes.astype(np.float32)


@dataclass(frozen=True, eq=False)
class A16:
    """Two a8 planes that add up: 15 bits of x in the groups of `fine`. `low` has only those, in order: codes i8[rows, 32 * len(fine)]."""

    high: A8
    low: A8
    fine: tuple[int, ...]

    @property
    def codes(self) -> Array:
        """The high plane's codes: what has a16's shape."""
        return self.high.codes

    def dequantise(self) -> Array:
        """f32[rows, k]"""
        x = self.high.dequantise()
        for i, g in enumerate(self.fine):
            x[:, g * GROUP : (g + 1) * GROUP] += self.low.dequantise()[:, i * GROUP : (i + 1) * GROUP]
        return x


def by_rows(quantise: Callable[[Array], T]) -> Callable[[Array], T]:
    """The same, some rows at a time: what is made of them stays in a core's cache, and gigabytes need no copies of themselves."""

    @wraps(quantise)
    def some(w: Array) -> T:
        rows = max(1, BLOCK // max(1, w.shape[-1]))
        if w.ndim != 2 or len(w) <= rows:
            return quantise(w)
        parts = [quantise(w[start : start + rows]) for start in range(0, len(w), rows)]
        names = [field.name for field in fields(parts[0])]  # type: ignore[arg-type]
        return type(parts[0])(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    return some


@by_rows
def quantise_q8(w: Array) -> Q8:
    """w f32[n, k] -> q8. Raises ValueError when k is not a multiple of 32."""
    groups = grouped(w)
    scales = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
    return Q8(ungrouped(np.clip(np.rint(divided(groups, scales)), -127, 127), np.int8), scales)


@by_rows
def quantise_q4(w: Array) -> Q4:
    """w f32[n, k] -> q4. Raises ValueError when k is not a multiple of 32."""
    groups = grouped(w)
    mins = groups.min(-1).astype(np.float16)
    shifted = groups - mins.astype(np.float32)[..., None]
    scales = ((groups.max(-1) - mins.astype(np.float32)) / np.float32(15)).astype(np.float16)
    return Q4(ungrouped(np.clip(np.rint(divided(shifted, scales)), 0, 15), np.uint8), scales, mins)


def quantise_f8(w: Array) -> F8:
    """w f32[n, k] -> f8."""
    w = np.asarray(w, np.float32)
    scales = (np.abs(w).max(-1) / np.float32(F8_MAX)).astype(np.float32)
    return F8(to_e4m3(np.divide(w, scales[:, None], out=np.zeros_like(w), where=scales[:, None] > 0)), scales)


def quantise_a8(x: Array) -> A8:
    """x f32[rows, k] -> a8. Raises ValueError when k is not a multiple of 32."""
    groups = grouped(x)
    top = np.abs(groups).max(-1)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > TINY)
    return A8(ungrouped(np.clip(np.rint(groups * inverse[..., None]), -127, 127), np.int8), top * np.float32(1 / 127))


def quantise_a16(x: Array, fine: tuple[int, ...]) -> A16:
    """x f32[rows, k] -> a16. Raises ValueError when k is not a multiple of 32."""
    high = quantise_a8(x)
    exact = high.codes.astype(np.float64) * np.repeat(high.scales.astype(np.float64), GROUP, axis=-1)  # a product of 8 and 24 bits is exact
    left = (np.asarray(x, np.float64) - exact).astype(np.float32)  # and so one rounding, as fma rounds
    return A16(high, quantise_a8(np.concatenate([left[:, g * GROUP : (g + 1) * GROUP] for g in fine], -1)), fine)


def linear_q(h: A8 | A16, w: Q8 | Q4) -> Array:
    """`h @ w^T` -> f32[rows, n]: exact integer dots per group, then `acc += dot * (h.scale * w.scale)` in f32, in group order.
    The second plane's groups of a16 come after the others, in the order of `fine`.

    With q4 a group adds `h.scale * (w.scale * dot + w.min * sum(h.codes))`.
    """
    rows, k = h.codes.shape
    acc = np.zeros((rows, w.codes.shape[0]), np.float32)
    plane = h.high if isinstance(h, A16) else h
    terms = [(plane, g, g) for g in range(k // GROUP)]  # plane, its group, the weight's group
    if isinstance(h, A16):
        terms += [(h.low, i, g) for i, g in enumerate(h.fine)]
    for plane, i, g in terms:
        part = slice(g * GROUP, (g + 1) * GROUP)
        codes = plane.codes[:, i * GROUP : (i + 1) * GROUP].astype(np.float32)  # dots stay below 2^24: f32 holds them exactly
        scale = plane.scales[:, i, None].astype(np.float32)
        dots = codes @ w.codes[:, part].astype(np.float32).T
        if isinstance(w, Q4):
            acc += scale * (dots * w.scales[:, g].astype(np.float32) + codes.sum(-1, keepdims=True) * w.mins[:, g].astype(np.float32))
        else:
            acc += dots * (scale * w.scales[:, g].astype(np.float32))
    return acc


def q8_from_gguf(blocks: Array, shape: tuple[int, int]) -> Q8:
    """GGUF Q8_0 blocks, u8 of n * k / 32 * 34 bytes, as q8[n, k]: the same codes and scales."""
    raw = np.ascontiguousarray(blocks, np.uint8).reshape(-1, Q8_0_BYTES)
    scales = np.ascontiguousarray(raw[:, :2]).view(np.float16).reshape(shape[0], -1)
    return Q8(np.ascontiguousarray(raw[:, 2:]).view(np.int8).reshape(shape), scales)


def q4_from_gguf(blocks: Array, shape: tuple[int, int]) -> Q4:
    """GGUF Q4_1 blocks, u8 of n * k / 32 * 20 bytes, as q4[n, k]: the same codes, scales and minima."""
    raw = np.ascontiguousarray(blocks, np.uint8).reshape(-1, Q4_1_BYTES)
    factors = np.ascontiguousarray(raw[:, :4]).view(np.float16)
    codes = np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], axis=1)
    return Q4(codes.reshape(shape), factors[:, 0].reshape(shape[0], -1), factors[:, 1].reshape(shape[0], -1))


def q4_from_gguf_symmetric(blocks: Array, shape: tuple[int, int]) -> Q4:
    """GGUF Q4_0 blocks, u8 of n * k / 32 * 18 bytes, as q4[n, k]: the same codes and scales; min is -8 * scale, exactly
    (infinite for a scale above 8188)."""
    raw = np.ascontiguousarray(blocks, np.uint8).reshape(-1, Q4_0_BYTES)
    scales = np.ascontiguousarray(raw[:, :2]).view(np.float16).reshape(shape[0], -1)
    codes = np.concatenate([raw[:, 2:] & 15, raw[:, 2:] >> 4], axis=1)
    with np.errstate(over="ignore"):
        return Q4(codes.reshape(shape), scales, scales * np.float16(-8))


def int4_blocks(codes: Array, zeros: Array, scales: Array) -> Array:
    """codes u8[n, k] in 0..15, zeros u8 and scales f16 [n, k / 32] -> blocks u8[n, k / 32 * 19]."""
    groups = codes.reshape(*zeros.shape, GROUP)
    factor = np.ascontiguousarray(scales, np.float16)[..., None].view(np.uint8)
    nibbles = groups[..., : GROUP // 2] | groups[..., GROUP // 2 :] << 4
    return np.concatenate([factor, zeros[..., None], nibbles], -1, dtype=np.uint8).reshape(len(codes), -1)


def from_int4_blocks(blocks: Array, shape: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Inverse of int4_blocks: codes, zeros, scales."""
    raw = np.ascontiguousarray(blocks, np.uint8).reshape(shape[0], -1, INT4_BYTES)
    codes = np.concatenate([raw[..., 3:] & 15, raw[..., 3:] >> 4], axis=-1)
    return codes.reshape(shape), raw[..., 2], np.ascontiguousarray(raw[..., :2]).view(np.float16)[..., 0]


def q4_from_int4(blocks: Array, shape: tuple[int, int]) -> Q4:
    """The same codes and scales; min is -zero * scale, rounded to f16 (exact for 8, infinite for a scale above 8188)."""
    codes, zeros, scales = from_int4_blocks(blocks, shape)
    with np.errstate(over="ignore"):
        return Q4(codes, scales, (scales.astype(np.float32) * -zeros.astype(np.float32)).astype(np.float16))


def q8_from_int4(blocks: Array, shape: tuple[int, int]) -> Q8:
    """The same numbers exactly: q8 has room for code - zero."""
    codes, zeros, scales = from_int4_blocks(blocks, shape)
    return Q8(codes.astype(np.int8) - np.repeat(zeros.astype(np.int8), GROUP, axis=-1), scales)


def f8_blocks(codes: Array, scales: Array) -> Array:
    """codes u8[n, k] and scales f32[n] -> blocks u8[n, k / 32 * 36]."""
    groups = codes.reshape(len(codes), -1, GROUP)
    factor = np.ascontiguousarray(np.broadcast_to(scales[:, None], groups.shape[:2]), np.float32)[..., None].view(np.uint8)
    return np.concatenate([factor, groups], -1).reshape(len(codes), -1)


def f8_from_blocks(blocks: Array, shape: tuple[int, int]) -> F8:
    """Inverse of f8_blocks."""
    raw = np.ascontiguousarray(blocks, np.uint8).reshape(shape[0], -1, F8_BYTES)
    return F8(np.ascontiguousarray(raw[..., 4:]).reshape(shape), np.ascontiguousarray(raw[:, 0, :4]).view(np.float32)[:, 0])


def grouped(x: Array) -> Array:
    """f32[..., k] -> f32[..., k / 32, 32]"""
    if x.shape[-1] % GROUP:
        raise ValueError(f"last axis is {x.shape[-1]}, expected a multiple of {GROUP}")
    return np.ascontiguousarray(x, np.float32).reshape(*x.shape[:-1], -1, GROUP)


def ungrouped(groups: Array, dtype: type[np.generic]) -> Array:
    return groups.astype(dtype).reshape(*groups.shape[:-2], -1)


def divided(groups: Array, scales: Array) -> Array:
    """groups / scale, 0 where the scale is 0."""
    scale = scales.astype(np.float32)[..., None]
    return np.divide(groups, scale, out=np.zeros_like(groups), where=scale != 0)


def spread(factors: Array) -> Array:
    """[..., k / 32] -> f32[..., k]: every element its group's factor."""
    return np.repeat(factors.astype(np.float32), GROUP, axis=-1)
