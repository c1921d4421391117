"""The GPUs' packed layouts, one for every architecture.

q8 weight [n, k]: blocks of 16 output rows (n padded with zeros), in each one tile of 16 x 32 codes for every group of 32 columns, a
row's codes side by side; behind all codes the scales, f16 [k / 32][n padded]. A tile is 512 bytes in a row, and a program's tiles follow
each other along k, so whole cache lines are read whatever the tile of the program.

q4: the same with two groups in a tile: the low nibbles are the even group's codes, the high ones the odd group's (k / 32 padded to an even
number), so that unpacking moves nothing between lanes; behind the scales the minima, in the same layout.

a8 activations [max_rows, k]: codes row by row, then scales f32 [max_rows, k / 32]. a16: the codes of the second planes follow in each row,
their scales in each row of scales.

f8 weight [n, k]: codes row by row, up to a multiple of 16 bytes; then the f32 scales of the rows.

All other weights are row-major as they are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.quantise import F8, Q4, Q8
from mlsdc.compiler.types import GROUP

ROWS = 16

Bytes = npt.NDArray[np.uint8]


def packed_bytes(n: int, k: int, bits: int) -> int:
    rows, groups = -(-n // ROWS) * ROWS, k // GROUP
    if bits == 8:
        return rows * groups * (GROUP + 2)
    groups += groups % 2
    return rows * groups * (GROUP // 2 + 4)


def pack_q8(weight: Q8) -> Bytes:
    """Codes i8[n, k] and scales f16[n, k / 32], packed."""
    return np.concatenate([tiles(weight.codes.view(np.uint8)), factors(weight.scales)])


def pack_q4(weight: Q4) -> Bytes:
    """Codes 0..15 u8[n, k], scales and minima f16[n, k / 32], packed."""
    n, k = weight.codes.shape
    more = k // GROUP % 2 * GROUP
    codes = np.pad(weight.codes, ((0, 0), (0, more))).reshape(n, -1, 2, GROUP)
    joined = (codes[:, :, 0] | codes[:, :, 1] << 4).astype(np.uint8).reshape(n, -1)
    scales, mins = (np.pad(part, ((0, 0), (0, more // GROUP))) for part in (weight.scales, weight.mins))
    return np.concatenate([tiles(joined), factors(scales), factors(mins)])


def f8_bytes(n: int, k: int) -> int:
    return -(-n * k // 16) * 16 + 4 * n


def pack_f8(weight: F8) -> Bytes:
    """Codes u8[n, k] and scales f32[n], packed."""
    codes = weight.codes.reshape(-1)
    padded = np.zeros(-(-len(codes) // 16) * 16, np.uint8)
    padded[: len(codes)] = codes
    return np.concatenate([padded, np.ascontiguousarray(weight.scales, np.float32).view(np.uint8)])


def unpack_q8(data: Bytes, n: int, k: int) -> Q8:
    """Inverse of pack_q8."""
    rows = -(-n // ROWS) * ROWS
    codes = data[: rows * k].reshape(rows // ROWS, k // GROUP, ROWS, GROUP).transpose(0, 2, 1, 3).reshape(rows, k)
    scales = data[rows * k :].view(np.float16).reshape(k // GROUP, rows).T
    return Q8(np.ascontiguousarray(codes[:n]).view(np.int8), np.ascontiguousarray(scales[:n]))


def unpack_q4(data: Bytes, n: int, k: int) -> Q4:
    """Inverse of pack_q4."""
    rows, groups = -(-n // ROWS) * ROWS, k // GROUP + k // GROUP % 2
    size = rows * groups * GROUP // 2
    tiled = data[:size].reshape(rows // ROWS, groups // 2, ROWS, GROUP).transpose(0, 2, 1, 3).reshape(rows, groups // 2, GROUP)
    codes = np.stack([tiled & 15, tiled >> 4], axis=2).reshape(rows, groups * GROUP)
    scales, mins = data[size:].view(np.float16).reshape(2, groups, rows).transpose(0, 2, 1)
    return Q4(codes[:n, :k].copy(), scales[:n, : k // GROUP].copy(), mins[:n, : k // GROUP].copy())


def tiles(codes: Bytes) -> Bytes:
    """u8[n, m] in tiles of 16 rows x 32 bytes, rows padded with zeros."""
    n, m = codes.shape
    rows = -(-n // ROWS) * ROWS
    padded = np.zeros((rows, m), np.uint8)
    padded[:n] = codes
    return np.ascontiguousarray(padded.reshape(rows // ROWS, ROWS, m // GROUP, GROUP).transpose(0, 2, 1, 3)).reshape(-1)


def factors(values: npt.NDArray[np.float16]) -> Bytes:
    """f16[n, groups] as [groups][n padded to 16] bytes."""
    n, groups = values.shape
    padded = np.zeros((groups, -(-n // ROWS) * ROWS), np.float16)
    padded[:, :n] = values.T
    return padded.reshape(-1).view(np.uint8)
