"""ggml's block formats in numpy, exactly as ggml dequantises them (products and sums in f32)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlsdc.compiler.errors import CaptureError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class BlockType:
    """`block` elements of a row are stored in `num_bytes` bytes; `decode` takes u8[blocks, num_bytes] to f32[blocks, block].

    The first `halves` f16 of a block are its scale and minimum.
    """

    name: str
    block: int
    num_bytes: int
    decode: Callable[[Bytes], Floats]
    halves: int = 0


def dequantise(type_: BlockType, raw: Bytes, shape: tuple[int, ...]) -> Floats:
    """The values of a tensor of `shape` from its bytes; NaN and infinity where the file says so."""
    with np.errstate(invalid="ignore", over="ignore"):
        return type_.decode(raw.reshape(-1, type_.num_bytes)).reshape(shape)


def finite_scales(type_: BlockType, raw: Bytes) -> bool:
    """False if a block's scale or minimum is NaN or infinite."""
    blocks = raw.reshape(-1, type_.num_bytes)
    return all(bool(np.isfinite(_half(blocks, 2 * i)).all()) for i in range(type_.halves))


def _half(blocks: Bytes, at: int) -> Floats:
    """The f16 at byte `at` of each block: f32[blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """u8[blocks, 16] -> u8[blocks, 32]: low nibbles are the first half of a block, high nibbles the second."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.int8) - 8).astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _by_gguf(name: str) -> Callable[[Bytes], Floats]:
    """Formats that no packer repacks are decoded by the `gguf` package, which knows all of them."""

    def decode(blocks: Bytes) -> Floats:
        try:
            import gguf
        except ImportError:
            raise CaptureError(f"{name} blocks are decoded by the 'gguf' package, which is not installed: pip install gguf") from None
        values: Floats = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).astype(np.float32)
        return values

    return decode


GGML_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, _f32),
    1: BlockType("F16", 1, 2, _f16),
    2: BlockType("Q4_0", 32, 18, _q4_0, halves=1),
    3: BlockType("Q4_1", 32, 20, _q4_1, halves=2),
    6: BlockType("Q5_0", 32, 22, _by_gguf("Q5_0")),
    7: BlockType("Q5_1", 32, 24, _by_gguf("Q5_1")),
    8: BlockType("Q8_0", 32, 34, _q8_0, halves=1),
    10: BlockType("Q2_K", 256, 84, _by_gguf("Q2_K")),
    11: BlockType("Q3_K", 256, 110, _by_gguf("Q3_K")),
    12: BlockType("Q4_K", 256, 144, _by_gguf("Q4_K")),
    13: BlockType("Q5_K", 256, 176, _by_gguf("Q5_K")),
    14: BlockType("Q6_K", 256, 210, _by_gguf("Q6_K")),
    30: BlockType("BF16", 1, 2, _bf16),
}
