"""The CPU's packed layouts, one for every ISA (FACTS-cpu.md section 2).

q8 weight [n, k]: blocks of 16 output rows, in each one superblock for every 64 columns: 2 x 16 f16 scales (group of 32 columns, row),
then for each group 8 x 64 bytes: bytes [kk][row][4] hold code + 128 of columns 4 kk .. 4 kk + 3. 1088 bytes, 17 cache lines. Rows are
padded to 16 and columns to 64 with zeros.

q4 weight [n, k]: the same blocks, a superblock of 640 bytes (10 cache lines): 2 x 16 f16 scales, 2 x 16 f16 minima, then for each
group 4 x 64 bytes: bytes [kk][row][4] hold in their low halves the codes of columns 4 kk .. 4 kk + 3, in their high halves those 16
columns further on.

bf16 weight [n, k], k even: the same blocks of 16 rows, 64 bytes for every two columns: [row][2].

f8 weight [n, k], k even: the same blocks of 16 rows, 16 bytes for every column: [row]; then the f32 scales of all (padded) rows.

a8 activations [rows, k]: int32 words of 4 codes, then f32 scales, then f32 corrections (-128 * sum of the group's codes, a
whole number). Tiles of 8
rows; the last tile holds the rest, mt rows. Word of (row m, columns 4 w ..): tile * 2 k + w * mt + m; scale and correction of (row m,
group g): tile * k / 4 + g * mt + m.
a16: the second planes of the `fine` groups follow as more columns, behind k's padding, and are padded to 64 themselves.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.quantise import A8, F8, Q4, Q8
from mlsdc.compiler.types import GROUP
from mlsdc.templates.params import PAIR_BYTES, padded, total_columns

ROWS = 16
SUPER = 64
SUPER_BYTES = PAIR_BYTES["q8"]
SUPER_BYTES_Q4 = PAIR_BYTES["q4"]


def q8_bytes(n: int, k: int) -> int:
    return padded(n, ROWS) // ROWS * (padded(k, SUPER) // SUPER) * SUPER_BYTES


def pack_q8(weight: Q8) -> npt.NDArray[np.uint8]:
    """Packed bytes of codes i8[n, k] and scales f16[n, k / 32]."""
    n, k = weight.codes.shape
    rows, columns = padded(n, ROWS), padded(k, SUPER)
    codes = np.full((rows, columns), 128, np.uint8)
    codes[:n, :k] = (weight.codes.astype(np.int16) + 128).astype(np.uint8)
    scales = np.zeros((rows, columns // GROUP), np.float16)
    scales[:n, : k // GROUP] = weight.scales
    out = np.empty((rows // ROWS, columns // SUPER, SUPER_BYTES), np.uint8)
    blocks = codes.reshape(rows // ROWS, ROWS, columns // SUPER, 2, 8, 4).transpose(0, 2, 3, 4, 1, 5)
    out[:, :, 64:] = blocks.reshape(rows // ROWS, columns // SUPER, -1)
    tops = np.ascontiguousarray(scales.reshape(rows // ROWS, ROWS, columns // SUPER, 2).transpose(0, 2, 3, 1))
    out[:, :, :64] = tops.view(np.uint8).reshape(rows // ROWS, columns // SUPER, 64)
    return out.reshape(-1)


def unpack_q8(data: npt.NDArray[np.uint8], n: int, k: int) -> Q8:
    """Inverse of pack_q8."""
    rows, columns = padded(n, ROWS), padded(k, SUPER)
    blocks = data.reshape(rows // ROWS, columns // SUPER, SUPER_BYTES)
    codes = blocks[:, :, 64:].reshape(rows // ROWS, columns // SUPER, 2, 8, ROWS, 4).transpose(0, 4, 1, 2, 3, 5).reshape(rows, columns)
    tops = np.ascontiguousarray(blocks[:, :, :64]).view(np.float16).reshape(rows // ROWS, columns // SUPER, 2, ROWS)
    scales = tops.transpose(0, 3, 1, 2).reshape(rows, columns // GROUP)
    return Q8((codes.astype(np.int16) - 128).astype(np.int8)[:n, :k], scales[:n, : k // GROUP])


def q4_bytes(n: int, k: int) -> int:
    return padded(n, ROWS) // ROWS * (padded(k, SUPER) // SUPER) * SUPER_BYTES_Q4


def pack_q4(weight: Q4) -> npt.NDArray[np.uint8]:
    """Packed bytes of codes u8[n, k], scales and minima f16[n, k / 32]."""
    n, k = weight.codes.shape
    rows, columns = padded(n, ROWS), padded(k, SUPER)
    codes = np.zeros((rows, columns), np.uint8)
    codes[:n, :k] = weight.codes
    out = np.empty((rows // ROWS, columns // SUPER, SUPER_BYTES_Q4), np.uint8)
    for at, factors in ((0, weight.scales), (64, weight.mins)):
        whole = np.zeros((rows, columns // GROUP), np.float16)
        whole[:n, : k // GROUP] = factors
        tops = np.ascontiguousarray(whole.reshape(rows // ROWS, ROWS, columns // SUPER, 2).transpose(0, 2, 3, 1))
        out[:, :, at : at + 64] = tops.view(np.uint8).reshape(rows // ROWS, columns // SUPER, 64)
    halves = codes.reshape(rows // ROWS, ROWS, columns // SUPER, 2, 2, 4, 4).transpose(4, 0, 2, 3, 5, 1, 6)
    out[:, :, 128:] = (halves[0] | halves[1] << 4).reshape(rows // ROWS, columns // SUPER, -1)
    return out.reshape(-1)


def unpack_q4(data: npt.NDArray[np.uint8], n: int, k: int) -> Q4:
    """Inverse of pack_q4."""
    rows, columns = padded(n, ROWS), padded(k, SUPER)
    blocks = data.reshape(rows // ROWS, columns // SUPER, SUPER_BYTES_Q4)
    packed = blocks[:, :, 128:].reshape(rows // ROWS, columns // SUPER, 2, 4, ROWS, 4)
    codes = np.stack((packed & 15, packed >> 4)).transpose(1, 5, 2, 3, 0, 4, 6).reshape(rows, columns)
    factors = [
        np.ascontiguousarray(blocks[:, :, at : at + 64]).view(np.float16).reshape(rows // ROWS, columns // SUPER, 2, ROWS)
        .transpose(0, 3, 1, 2).reshape(rows, columns // GROUP)[:n, : k // GROUP]
        for at in (0, 64)]
    return Q4(np.ascontiguousarray(codes[:n, :k]), factors[0], factors[1])


def bf16_bytes(n: int, k: int) -> int:
    return padded(n, ROWS) * k * 2


def pack_bf16(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Packed bytes of f32[n, k], rounded to nearest even."""
    n, k = weight.shape
    bits = np.zeros((padded(n, ROWS), k), np.uint32)
    bits[:n] = np.ascontiguousarray(weight, np.float32).view(np.uint32)
    bits += 0x7FFF + (bits >> 16 & 1)
    blocks = (bits >> 16).astype(np.uint16).reshape(-1, ROWS, k // 2, 2).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(blocks).view(np.uint8).reshape(-1)


def f8_bytes(n: int, k: int) -> int:
    return padded(n, ROWS) * (k + 4)


def pack_f8(weight: F8) -> npt.NDArray[np.uint8]:
    """Packed bytes of codes u8[n, k] and scales f32[n]."""
    n, k = weight.codes.shape
    codes = np.zeros((padded(n, ROWS), k), np.uint8)
    codes[:n] = weight.codes
    scales = np.zeros(padded(n, ROWS), np.float32)
    scales[:n] = weight.scales
    blocks = np.ascontiguousarray(codes.reshape(-1, ROWS, k).transpose(0, 2, 1))
    return np.concatenate([blocks.reshape(-1), scales.view(np.uint8)])


def a8_offsets(rows_padded: int, k: int, fine: int = 0) -> tuple[int, int, int]:
    """Byte offsets of scales and corrections in an a8 or a16 value's storage, and its size; codes start at 0."""
    columns = total_columns(k, fine)
    scales = rows_padded * columns
    corrections = padded(scales + rows_padded * columns // GROUP * 4, 64)
    return scales, corrections, padded(corrections + rows_padded * columns // GROUP * 4, 64)


def unpack_a8(data: npt.NDArray[np.uint8], rows: int, rows_padded: int, k: int) -> A8:
    """Codes and scales of the first `rows` rows of an a8 value's storage."""
    columns = padded(k, SUPER)
    scales_at, corrections_at, _ = a8_offsets(rows_padded, k)
    words = data[:scales_at].view(np.int8).reshape(-1, 4)
    tops = data[scales_at:corrections_at].view(np.float32)
    codes = np.empty((rows, columns), np.int8)
    scales = np.empty((rows, columns // GROUP), np.float32)
    for row in range(rows):
        tile, m = divmod(row, 8)
        mt = min(8, rows - 8 * tile)
        codes[row] = words[tile * 2 * columns + np.arange(columns // 4) * mt + m].reshape(-1)
        scales[row] = tops[tile * columns // 4 + np.arange(columns // GROUP) * mt + m]
    return A8(codes[:, :k], scales[:, : k // GROUP])
