"""Three published ways to store a linear's 4-bit weight, taken apart: AWQ (gemm), GPTQ, and compressed-tensors' pack-quantized.

All mean `w[n, k] = scale[n, g] * (code[n, k] - zero[n, g])` with g the group of column k, codes and zero points whole numbers.

    AWQ     qweight i32[k, n / 8], qzeros i32[k / G, n / 8], scales f16[k / G, n]: eight columns of n in a word, in the order AWQ_ORDER
    GPTQ    qweight i32[k / 8, n], qzeros i32[k / G, n / 8], scales f16[k / G, n], g_idx i32[k]: low nibble first; format `gptq` (v1) stores
            zero - 1, `gptq_v2` the zero itself. g_idx names each column's group: with desc_act they are in no order
    packed  weight_packed i32[n, k / 8], weight_scale [n, k / G], weight_zero_point i32[n / 8, k / G] where asymmetric, weight_shape i64[2],
            weight_g_idx i32[k]: low nibble first, a signed number is stored as itself + 8

Sources of the layouts: AutoAWQ's WQLinear_GEMM, AutoGPTQ's and GPTQModel's README and QuantLinear, compressed-tensors' pack_to_int32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlsdc.compiler.types import GROUP

Array = NDArray[Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is column AWQ_ORDER[i] of its eight
SIGN = 8  # what is added to a signed 4-bit number to store it


@dataclass(frozen=True, eq=False)
class Int4:
    """codes u8[n, k] in 0..15, zeros u8[n, groups] in 0..16, scales f32[n, groups], group i32[k]: the group of each column."""

    codes: Array
    zeros: Array
    scales: Array
    group: Array

    def dequantise(self) -> Array:
        """f32[n, k]: one rounding each."""
        signed = self.codes.astype(np.float32) - self.zeros.astype(np.float32)[:, self.group]
        values: Array = self.scales[:, self.group] * signed
        return values

    def by_32(self) -> tuple[Array, Array, Array] | None:
        """codes, zeros u8 and scales f16 [n, k / 32]; None unless each 32 columns share a group and f16 holds the scales."""
        n, k = self.codes.shape
        if k % GROUP:
            return None
        groups = self.group.reshape(-1, GROUP)
        with np.errstate(over="ignore"):
            scales = self.scales.astype(np.float16)
        if (groups != groups[:, :1]).any() or not np.array_equal(scales.astype(np.float32), self.scales):
            return None
        return self.codes, self.zeros[:, groups[:, 0]], scales[:, groups[:, 0]]


def nibbles(words: Array) -> Array:
    """i32[..., m] -> u8[..., 8 m], the low nibble first."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    spread = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32(15)
    return spread.astype(np.uint8).reshape(*words.shape[:-1], -1)


def awq(parts: Mapping[str, Array], group_size: int) -> Int4:
    """Raises ValueError, saying what does not fit. `group_size` -1: one group a row."""
    words, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    k, n = words.shape[0], words.shape[1] * 8
    groups = check_groups(k, group_size)
    expect("qzeros", zeros, (groups, n // 8))
    expect("scales", scales, (groups, n))
    place = np.argsort(AWQ_ORDER)  # column j of eight is nibble place[j]
    codes, points = (nibbles(w).reshape(len(w), -1, 8)[..., place].reshape(len(w), n) for w in (words, zeros))
    return Int4(np.ascontiguousarray(codes.T), np.ascontiguousarray(points.T), transposed(scales), by_size(k, groups))


def gptq(parts: Mapping[str, Array], group_size: int, zero_offset: int) -> Int4:
    """The same; `zero_offset` is 1 for format v1."""
    words, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    k, n = words.shape[0] * 8, words.shape[1]
    groups = check_groups(k, group_size)
    expect("qzeros", zeros, (groups, n // 8))
    expect("scales", scales, (groups, n))
    codes = nibbles(np.ascontiguousarray(words.T))
    points = np.ascontiguousarray(nibbles(zeros).T) + np.uint8(zero_offset)
    return Int4(codes, points, transposed(scales), given_groups(parts.get("g_idx"), "g_idx", k, groups))


def packed(parts: Mapping[str, Array], group_size: int) -> Int4:
    """The same for compressed-tensors."""
    words, scales = parts["weight_packed"], parts["weight_scale"]
    expect("weight_shape", parts["weight_shape"], (2,))
    n, k = (int(size) for size in parts["weight_shape"])
    groups = check_groups(k, group_size)
    expect("weight_packed", words, (n, -(-k // 8)))
    expect("weight_scale", scales, (n, groups))
    zeros = np.full((n, groups), SIGN, np.uint8)
    if "weight_zero_point" in parts:
        points = parts["weight_zero_point"]
        expect("weight_zero_point", points, (-(-n // 8), groups))
        zeros = np.ascontiguousarray(nibbles(np.ascontiguousarray(points.T)).T[:n])
    codes = np.ascontiguousarray(nibbles(words)[:, :k])
    return Int4(codes, zeros, np.asarray(scales, np.float32), given_groups(parts.get("weight_g_idx"), "weight_g_idx", k, groups))


def check_groups(k: int, group_size: int) -> int:
    """How many groups k columns make."""
    if group_size == -1:
        return 1
    if group_size <= 0 or k % group_size:
        raise ValueError(f"{k} columns are no whole number of groups of {group_size} (group_size)")
    return k // group_size


def expect(what: str, found: Array, shape: tuple[int, ...]) -> None:
    if found.shape != shape:
        raise ValueError(f"{what} has shape {list(found.shape)}, expected {list(shape)}")


def transposed(scales: Array) -> Array:
    return np.ascontiguousarray(np.asarray(scales, np.float32).T)


def by_size(k: int, groups: int) -> Array:
    return np.repeat(np.arange(groups, dtype=np.int32), k // groups)


def given_groups(index: Array | None, what: str, k: int, groups: int) -> Array:
    if index is None or (index < 0).all():  # -1 everywhere: not set
        return by_size(k, groups)
    expect(what, index, (k,))
    if (index < 0).any() or (index >= groups).any():
        raise ValueError(f"{what} names groups {int(index.min())} to {int(index.max())}, there are {groups}")
    return index.astype(np.int32)
