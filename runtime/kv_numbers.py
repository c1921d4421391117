"""Numbers of the KV cache in numpy: bf16, e4m3, f16 scales and the Hadamard rotation, bit for bit as the kernels compute them."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
MAX_SCALE = np.float32(65504.0)  # the largest f16


def to_bf16(x: F32) -> npt.NDArray[np.uint16]:
    """f32 -> bf16 bits, round to nearest even (NaN stays NaN)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_e4m3(x: F32) -> npt.NDArray[np.uint8]:
    """f32 -> e4m3 bits (1.4.3, bias 7, no infinities), round to nearest even, |x| cut to 448."""
    magnitude = np.minimum(np.abs(np.asarray(x, np.float32)), np.float32(448))
    exponent = np.maximum((magnitude.view(np.int32) >> 23) - 127, -6)  # below 2^-6 the steps are those of 2^-6
    steps = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int32)  # 8 .. 16 of the binade's eighths; 0 .. 8 at the bottom
    code = ((exponent + 6) << 3) + steps
    return np.asarray(np.signbit(x).astype(np.uint8) << 7 | code.astype(np.uint8), np.uint8)


def from_e4m3(bits: npt.NDArray[np.uint8]) -> F32:
    return np.asarray(_e4m3_values()[bits])


@cache
def _e4m3_values() -> F32:
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    values = np.where(exponent, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(mantissa.astype(float), -9)).astype(np.float32)
    values[127] = np.nan
    return np.concatenate([values, -values])


def to_f16(x: np.float32) -> np.float16:
    """A scale or a minimum as it is stored: f16, cut to its range."""
    return np.float16(np.clip(np.float32(x), -MAX_SCALE, MAX_SCALE))


def rotation_size(head_dim: int) -> int:
    """Size of a block of the rotation: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


def rotate(x: F32) -> F32:
    """Block-diagonal Hadamard rotation of x[.., d]: symmetric and orthonormal, so that it is its own inverse.

    Butterflies from neighbours up, sums only, and one multiply at the end: the order in which the kernels add.
    """
    size = rotation_size(x.shape[-1])
    out = np.asarray(x, np.float32).reshape(*x.shape[:-1], x.shape[-1] // size, size)
    step = 1
    while step < size:
        pairs = out.reshape(*out.shape[:-1], size // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack([a + b, a - b], axis=-2).reshape(out.shape)
        step *= 2
    return np.asarray(out * np.float32(size**-0.5), np.float32).reshape(x.shape)
