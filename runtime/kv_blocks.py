"""How the keys or the values of one (layer, kv head) lie in a page, for every format: the numpy oracle of what kernels write and read.

Keys are interleaved by 16 tokens, so that a vector lane is a token and a score needs no horizontal sum; values by 4 tokens (a lane is a
channel, its 4 bytes are the terms of one integer dot) or by 1. All numbers of one token are whole bytes of its own: rows written at
once by several threads never share a byte.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mlsdc.runtime.kv_numbers import F32, from_bf16, from_e4m3, rotate, to_bf16, to_e4m3, to_f16

LANES = 16  # keys are interleaved by 16 tokens: one vector lane per token, whatever the ISA
QUAD = 4  # values by 4 tokens where they meet integer dots
Bytes = npt.NDArray[np.uint8]


class Block(ABC):
    """The K block or the V block of a format: how one head's vectors of `page_size` tokens look in a page. Stateless."""

    name: ClassVar[str]
    rotated: ClassVar[bool] = False  # written after the Hadamard rotation of its head

    @abstractmethod
    def block_bytes(self, page_size: int, head_dim: int) -> int: ...

    @abstractmethod
    def store(self, block: Bytes, slot: int, x: F32) -> None:
        """Write x[head_dim], rotated where the format is, at `slot`."""

    @abstractmethod
    def load(self, block: Bytes, head_dim: int) -> F32:
        """All of the block dequantised, still rotated where the format is: f32[page_size, head_dim]."""

    def write(self, block: Bytes, slot: int, x: F32) -> None:
        """Store the token's vector x[head_dim] (f32) at `slot`."""
        self.store(block, slot, rotate(x) if self.rotated else x)

    def read(self, block: Bytes, head_dim: int) -> F32:
        """The whole block dequantised, f32[page_size, head_dim]."""
        x = self.load(block, head_dim)
        return rotate(x) if self.rotated else x

    def bits(self, page_size: int, head_dim: int) -> float:
        """Bits an element, scales included."""
        return 8 * self.block_bytes(page_size, head_dim) / (page_size * head_dim)


class Bf16Keys(Block):
    """u32 words `[page_size / 16][head_dim / 2][16 tokens]` of two bf16 channels."""

    name = "bf16"

    def block_bytes(self, page_size: int, head_dim: int) -> int:
        return 2 * page_size * head_dim

    def store(self, block: Bytes, slot: int, x: F32) -> None:
        keys = block.view(np.uint16).reshape(-1, len(x) // 2, LANES, 2)
        keys[slot // LANES, :, slot % LANES, :] = to_bf16(x).reshape(-1, 2)

    def load(self, block: Bytes, head_dim: int) -> F32:
        keys = block.view(np.uint16).reshape(-1, head_dim // 2, LANES, 2).transpose(0, 2, 1, 3).reshape(-1, head_dim)
        return from_bf16(keys)


class Bf16Values(Block):
    """bf16 `[page_size][head_dim]`: a vector lane is a channel."""

    name = "bf16"
    block_bytes = Bf16Keys.block_bytes

    def store(self, block: Bytes, slot: int, x: F32) -> None:
        block.view(np.uint16).reshape(-1, len(x))[slot] = to_bf16(x)

    def load(self, block: Bytes, head_dim: int) -> F32:
        return from_bf16(block.view(np.uint16).reshape(-1, head_dim))


def scaled(x: F32, top: float, most: float) -> tuple[np.float16, F32]:
    """(scale f16, x / scale in -most .. most): the scale takes the largest |x| to `top`."""
    scale = to_f16(np.abs(x).max() * np.float32(1 / top))
    inverse = np.float32(1) / np.float32(scale) if scale > 0 else np.float32(0)
    return scale, np.clip(x * inverse, np.float32(-most), np.float32(most))


class _Bytes(Block):
    """One byte an element and one f16 scale a token, behind all codes."""

    def block_bytes(self, page_size: int, head_dim: int) -> int:
        return page_size * (head_dim + 2)

    def _split(self, block: Bytes, head_dim: int) -> tuple[Bytes, npt.NDArray[np.float16]]:
        """Codes as u8[blocks of tokens, .., tokens of a block, ..] and scales f16[page_size]."""
        page_size = len(block) // (head_dim + 2)
        return block[: page_size * head_dim], block[page_size * head_dim :].view(np.float16)


def key_bytes(codes: Bytes, head_dim: int) -> Bytes:
    """A view u8[page_size / 16, 16 tokens, head_dim / 4, 4]: words of 4 channels, interleaved by 16 tokens."""
    return codes.reshape(-1, head_dim // 4, LANES, 4).transpose(0, 2, 1, 3)


def value_bytes(codes: Bytes, head_dim: int) -> Bytes:
    """A view u8[page_size / 4, 4 tokens, head_dim]."""
    return codes.reshape(-1, head_dim, QUAD).transpose(0, 2, 1)


class Int8Keys(_Bytes):
    """x = scale * (code - 128), scale = max|x| / 127 of the token; words `[page_size / 16][head_dim / 4][16 tokens][4]`."""

    name = "int8"

    def store(self, block: Bytes, slot: int, x: F32) -> None:
        codes, scales = self._split(block, len(x))
        scales[slot], units = scaled(x, 127, 127)
        key_bytes(codes, len(x))[slot // LANES, slot % LANES] = (np.rint(units) + 128).astype(np.uint8).reshape(-1, 4)

    def load(self, block: Bytes, head_dim: int) -> F32:
        codes, scales = self._split(block, head_dim)
        units = key_bytes(codes, head_dim).reshape(-1, head_dim).astype(np.float32) - 128
        return units * scales.astype(np.float32)[:, None]


class Int8Values(_Bytes):
    """As Int8Keys, in bytes `[page_size / 4][head_dim][4 tokens]`."""

    name = "int8"

    def store(self, block: Bytes, slot: int, x: F32) -> None:
        codes, scales = self._split(block, len(x))
        scales[slot], units = scaled(x, 127, 127)
        value_bytes(codes, len(x))[slot // QUAD, slot % QUAD] = (np.rint(units) + 128).astype(np.uint8)

    def load(self, block: Bytes, head_dim: int) -> F32:
        codes, scales = self._split(block, head_dim)
        units = value_bytes(codes, head_dim).reshape(-1, head_dim).astype(np.float32) - 128
        return units * scales.astype(np.float32)[:, None]


class Fp8Keys(_Bytes):
    """x = scale * e4m3, scale = max|x| / 448 of the token; words `[page_size / 16][head_dim / 4][16 tokens][4]`."""

    name = "fp8"

    def store(self, block: Bytes, slot: int, x: F32) -> None:
        codes, scales = self._split(block, len(x))
        scales[slot], units = scaled(x, 448, 448)
        key_bytes(codes, len(x))[slot // LANES, slot % LANES] = to_e4m3(units).reshape(-1, 4)

    def load(self, block: Bytes, head_dim: int) -> F32:
        codes, scales = self._split(block, head_dim)
        return from_e4m3(key_bytes(codes, head_dim).reshape(-1, head_dim)) * scales.astype(np.float32)[:, None]


class Fp8Values(_Bytes):
    """As Fp8Keys, in bytes `[page_size][head_dim]`."""

    name = "fp8"

    def store(self, block: Bytes, slot: int, x: F32) -> None:
        codes, scales = self._split(block, len(x))
        scales[slot], units = scaled(x, 448, 448)
        codes.reshape(-1, len(x))[slot] = to_e4m3(units)

    def load(self, block: Bytes, head_dim: int) -> F32:
        codes, scales = self._split(block, head_dim)
        return from_e4m3(codes.reshape(-1, head_dim)) * scales.astype(np.float32)[:, None]


def levels(x: F32, most: int) -> tuple[np.float16, np.float16, npt.NDArray[np.uint8]]:
    """(scale, minimum, codes 0 .. most) of x: x is near scale * code + minimum, the extremes of x are the extremes of the codes."""
    low = to_f16(x.min() + np.float32(0))  # no negative zero
    scale = to_f16(np.maximum(x.max() - np.float32(low), np.float32(0)) * np.float32(1 / most))
    inverse = np.float32(1) / np.float32(scale) if scale > 0 else np.float32(0)
    return scale, low, np.clip(np.rint((x - np.float32(low)) * inverse), 0, most).astype(np.uint8)


class Int4TokenKeys(Block):
    """Rotated; x = scale * code + minimum, a token's own. Words `[page_size / 16][head_dim / 8][16 tokens][4]`: low nibbles hold the first
    half of the head's channels, high nibbles the second; then the scales, then the minima."""

    name = "int4-token"
    rotated = True

    def block_bytes(self, page_size: int, head_dim: int) -> int:
        return page_size * (head_dim // 2 + 4)

    def store(self, block: Bytes, slot: int, x: F32) -> None:
        codes, tops = self._split(block, len(x))
        tops[0, slot], tops[1, slot], found = levels(x, 15)
        low, high = found.reshape(2, -1)
        key_bytes(codes, len(x) // 2)[slot // LANES, slot % LANES] = (low | high << 4).reshape(-1, 4)

    def load(self, block: Bytes, head_dim: int) -> F32:
        codes, tops = self._split(block, head_dim)
        return unpacked(key_bytes(codes, head_dim // 2).reshape(-1, head_dim // 2), tops)

    def _split(self, block: Bytes, head_dim: int) -> tuple[Bytes, npt.NDArray[np.float16]]:
        """Codes, and f16[scale or minimum, page_size]."""
        page_size = len(block) // (head_dim // 2 + 4)
        codes = page_size * head_dim // 2
        return block[:codes], block[codes:].view(np.float16).reshape(2, -1)


def unpacked(nibbles: Bytes, tops: npt.NDArray[np.float16]) -> F32:
    """u8[tokens, n] of low and high halves -> f32[tokens, 2n]."""
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32)
    scale, low = tops.astype(np.float32)[:, :, None]
    return codes * scale + low


def half_channels(head_dim: int) -> int:
    """Channels in the low nibbles of int4 values: whole vectors of 16, one more than in the high ones where their number is odd."""
    return -(-head_dim // 32) * 16


class Int4TokenValues(Block):
    """As Int4TokenKeys, in bytes `[page_size / 4][half the channels][4 tokens]`; a half is made of whole vectors of 16 channels."""

    name = "int4-token"
    rotated = True

    def block_bytes(self, page_size: int, head_dim: int) -> int:
        return page_size * (half_channels(head_dim) + 4)

    def store(self, block: Bytes, slot: int, x: F32) -> None:
        codes, tops = self._split(block, len(x))
        tops[0, slot], tops[1, slot], found = levels(x, 15)
        half = half_channels(len(x))
        high = np.zeros(half, np.uint8)
        high[: len(x) - half] = found[half:]
        value_bytes(codes, half)[slot // QUAD, slot % QUAD] = found[:half] | high << 4

    def load(self, block: Bytes, head_dim: int) -> F32:
        codes, tops = self._split(block, head_dim)
        half = half_channels(head_dim)
        return unpacked(value_bytes(codes, half).reshape(-1, half), tops)[:, :head_dim]

    def _split(self, block: Bytes, head_dim: int) -> tuple[Bytes, npt.NDArray[np.float16]]:
        half = half_channels(head_dim)
        codes = len(block) // (half + 4) * half
        return block[:codes], block[codes:].view(np.float16).reshape(2, -1)


KEYS: dict[str, Block] = {block.name: block for block in (Bf16Keys(), Int8Keys(), Fp8Keys(), Int4TokenKeys())}
VALUES: dict[str, Block] = {block.name: block for block in (Bf16Values(), Int8Values(), Fp8Values(), Int4TokenValues())}
