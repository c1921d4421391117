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
    grouped: ClassVar[bool] = False  # read only behind a tail of recent tokens in 16 bits (law L3)

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

    def store_group(self, block: Bytes, xs: F32) -> None:
        """Write a page's tokens, xs[page_size, head_dim], rotated where the format is."""
        for slot, x in enumerate(xs):
            self.store(block, slot, x)

    def write_group(self, block: Bytes, xs: F32) -> None:
        """Store a page's vectors, xs[page_size, head_dim] in f32."""
        self.store_group(block, rotate(xs) if self.rotated else xs)

    def read(self, block: Bytes, head_dim: int) -> F32:
        """The whole block dequantised, f32[page_size, head_dim]."""
        x = self.load(block, head_dim)
        return rotate(x) if self.rotated else x

    def coarse(self, block: Bytes, head_dim: int) -> F32:
        """What a level that wants less of it reads, f32[page_size, head_dim]: the same, but of nested formats."""
        return self.read(block, head_dim)

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


def key_bytes(codes: Bytes, head_dim: int) -> Bytes:
    """A view u8[page_size / 16, 16 tokens, head_dim / 4, 4]: words of 4 channels, interleaved by 16 tokens."""
    return codes.reshape(-1, head_dim // 4, LANES, 4).transpose(0, 2, 1, 3)


def value_bytes(codes: Bytes, head_dim: int) -> Bytes:
    """A view u8[page_size / 4, 4 tokens, head_dim]."""
    return codes.reshape(-1, head_dim, QUAD).transpose(0, 2, 1)


class _Bytes(Block):
    """x = scale * what its byte stands for, scale = max|x| / `top` of the token: one byte an element, and f16 scales behind all codes."""

    top: ClassVar[float]

    @abstractmethod
    def encode(self, units: F32) -> Bytes:
        """Bytes of x / scale, -top .. top."""

    @abstractmethod
    def decode(self, codes: Bytes) -> F32: ...

    @abstractmethod
    def view(self, codes: Bytes, head_dim: int) -> Bytes:
        """The codes of a block as u8[page_size / n, n tokens, ..], a token's in order of channels."""

    def block_bytes(self, page_size: int, head_dim: int) -> int:
        return page_size * (head_dim + 2)

    def store(self, block: Bytes, slot: int, x: F32) -> None:
        codes, scales = self._split(block, len(x))
        scales[slot], units = scaled(x, self.top, self.top)
        tokens = self.view(codes, len(x))
        tokens[divmod(slot, tokens.shape[1])] = self.encode(units).reshape(tokens.shape[2:])

    def load(self, block: Bytes, head_dim: int) -> F32:
        codes, scales = self._split(block, head_dim)
        return self.decode(self.view(codes, head_dim).reshape(-1, head_dim)) * scales.astype(np.float32)[:, None]

    def _split(self, block: Bytes, head_dim: int) -> tuple[Bytes, npt.NDArray[np.float16]]:
        """Codes, and f16[page_size]."""
        size = len(block) // (head_dim + 2) * head_dim
        return block[:size], block[size:].view(np.float16)


class _Int8(_Bytes):
    """A byte is a whole number plus 128."""

    name = "int8"
    top = 127

    def encode(self, units: F32) -> Bytes:
        return (np.rint(units) + 128).astype(np.uint8)

    def decode(self, codes: Bytes) -> F32:
        return codes.astype(np.float32) - 128


def run_channels(head_dim: int, parts: int) -> int:
    """Channels of a run of packed values: whole vectors of 16; the last run may be shorter."""
    return -(-head_dim // (16 * parts)) * 16


class _Nested(_Int8):
    """int8 whose bytes lie in two planes, high nibbles and then low ones; a byte of a plane holds those of two runs of a head's channels.

    `coarse` reads the high plane alone, each byte as the middle of its 16.
    """

    name = "int8n"
    parts = 2

    @abstractmethod
    def run(self, head_dim: int) -> int:
        """Channels of a run: bytes of a token in a plane."""

    def block_bytes(self, page_size: int, head_dim: int) -> int:
        return page_size * (2 * self.run(head_dim) + 2)

    def store(self, block: Bytes, slot: int, x: F32) -> None:
        planes, scales = self._planes(block, len(x))
        run = self.run(len(x))
        codes = np.zeros(2 * run, np.uint8)
        scales[slot], units = scaled(x, self.top, self.top)
        codes[: len(x)] = self.encode(units)
        first, second = codes[:run], codes[run:]
        for plane, nibbles in zip(planes, (first >> 4 | second & 0xF0, first & 0xF | second << 4), strict=True):
            tokens = self.view(plane, run)
            tokens[divmod(slot, tokens.shape[1])] = nibbles.reshape(tokens.shape[2:])

    def load(self, block: Bytes, head_dim: int) -> F32:
        return self._read(block, head_dim, coarse=False)

    def coarse(self, block: Bytes, head_dim: int) -> F32:
        """What a view of the high plane gives: f32[page_size, head_dim]."""
        x = self._read(block, head_dim, coarse=True)
        return rotate(x) if self.rotated else x

    def _read(self, block: Bytes, head_dim: int, *, coarse: bool) -> F32:
        planes, scales = self._planes(block, head_dim)
        run = self.run(head_dim)
        high, low = (self.view(plane, run).reshape(-1, run) for plane in planes)
        low = np.full_like(low, 0x88) if coarse else low
        codes = np.concatenate([high << 4 | low & 0xF, high & 0xF0 | low >> 4], axis=1)
        return self.decode(codes[:, :head_dim]) * scales.astype(np.float32)[:, None]

    def _planes(self, block: Bytes, head_dim: int) -> tuple[tuple[Bytes, Bytes], npt.NDArray[np.float16]]:
        """Both planes, and f16[page_size]."""
        size = len(block) // (2 * self.run(head_dim) + 2) * self.run(head_dim)
        return (block[:size], block[size : 2 * size]), block[2 * size :].view(np.float16)


class NestedKeys(_Nested):
    """Rotated, as int8's. Words `[page_size / 16][head_dim / 8][16 tokens][4]` a plane."""

    rotated = True

    def run(self, head_dim: int) -> int:
        return head_dim // 2

    def view(self, codes: Bytes, head_dim: int) -> Bytes:
        return key_bytes(codes, head_dim)


class NestedValues(_Nested):
    """Bytes `[page_size / 4][channels of a run][4 tokens]` a plane; runs are made of whole vectors of 16 channels."""

    def run(self, head_dim: int) -> int:
        return run_channels(head_dim, self.parts)

    def view(self, codes: Bytes, head_dim: int) -> Bytes:
        return value_bytes(codes, head_dim)


class _Fp8(_Bytes):
    name = "fp8"
    top = 448

    def encode(self, units: F32) -> Bytes:
        return to_e4m3(units)

    def decode(self, codes: Bytes) -> F32:
        return from_e4m3(codes)


class Int8Keys(_Int8):
    """Rotated: a key's few large channels would coarsen the step of all others. Words `[page_size / 16][head_dim / 4][16 tokens][4]`."""

    rotated = True

    def view(self, codes: Bytes, head_dim: int) -> Bytes:
        return key_bytes(codes, head_dim)


class Int8Values(_Int8):
    """Bytes `[page_size / 4][head_dim][4 tokens]`."""

    def view(self, codes: Bytes, head_dim: int) -> Bytes:
        return value_bytes(codes, head_dim)


class Fp8Keys(_Fp8):
    """Words `[page_size / 16][head_dim / 4][16 tokens][4]`."""

    def view(self, codes: Bytes, head_dim: int) -> Bytes:
        return key_bytes(codes, head_dim)


class Fp8Values(_Fp8):
    """Bytes `[page_size][head_dim]`: they meet no integer dots."""

    def view(self, codes: Bytes, head_dim: int) -> Bytes:
        return codes.reshape(-1, 1, head_dim)
