"""Blocks of 4, 3 or 2 bits an element: rotated, each number a scale times its code plus a minimum, of a token or of a channel of a page."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mlsdc.runtime.kv_blocks import LANES, Block, Bytes, key_bytes, run_channels, value_bytes
from mlsdc.runtime.kv_numbers import F32, to_f16


def levels(x: F32, most: int, cut: float = 0.0) -> tuple[np.float16, np.float16, npt.NDArray[np.uint8]]:
    """(scale, minimum, codes 0 .. most) of x: x is near scale * code + minimum, the extremes of x are the extremes of the codes.

    `cut`, a power of two or 0, is the share of the range that is left to each side of them.
    """
    least, largest = x.min() + np.float32(0), x.max()  # no negative zero
    beyond = (largest - least) * np.float32(cut) if cut else np.float32(0)  # exact
    low = to_f16(least + beyond)
    scale = to_f16(np.maximum((largest - beyond) - np.float32(low), np.float32(0)) * np.float32(1 / most))
    inverse = np.float32(1) / np.float32(scale) if scale > 0 else np.float32(0)
    return scale, low, np.clip(np.rint((x - np.float32(low)) * inverse), 0, most).astype(np.uint8)


class _Parts(Block):
    """Codes of 4, 3 or 2 bits: a byte holds a code of each of `parts` equal runs of a head's channels, the first run in the lowest bits.

    Of 3 bits so the lower two; the highest ones lie in a plane of their own behind all of these: a byte holds those of both bytes that
    are `unit` apart (in two neighbouring words, or in both halves of a vector), the first one's runs in its lower half.
    """

    bits_: ClassVar[int]
    cut: ClassVar[float] = 0.0  # of `levels`
    unit: ClassVar[int]  # bytes of a word of keys, or of half a vector of values
    rotated = True

    @property
    def low_bits(self) -> int:
        return self.bits_ // 2 * 2

    @property
    def parts(self) -> int:
        return 8 // self.low_bits

    @property
    def most(self) -> int:
        """The largest code."""
        return (1 << self.bits_) - 1

    def high_run(self, run: int) -> int:
        """Bytes of a token's highest bits, where its others take `run` bytes."""
        return -(-run // (2 * self.unit)) * self.unit if self.bits_ % 2 else 0

    def pack(self, codes: Bytes) -> Bytes:
        """u8[.., channels] -> u8[.., channels / parts]."""
        runs = np.split(codes & (1 << self.low_bits) - 1, self.parts, axis=-1)
        return np.asarray(np.bitwise_or.reduce([run << (self.low_bits * k) for k, run in enumerate(runs)]), np.uint8)

    def pack_high(self, codes: Bytes) -> Bytes:
        """u8[.., channels] -> u8[.., high_run]."""
        run = codes.shape[-1] // self.parts
        if not self.high_run(run):
            return codes[..., :0]
        bits = np.zeros((*codes.shape[:-1], self.parts, 2 * self.high_run(run)), np.uint8)
        bits[..., :run] = codes.reshape(*codes.shape[:-1], self.parts, run) >> self.low_bits
        pairs = bits.reshape(*bits.shape[:-1], -1, 2, self.unit)
        shifts = (np.arange(2, dtype=np.uint8) * 4 + np.arange(self.parts, dtype=np.uint8)[:, None])[:, None, :, None]
        bytes_ = np.bitwise_or.reduce(np.bitwise_or.reduce(pairs << shifts, axis=-2), axis=-3)
        return np.asarray(bytes_, np.uint8).reshape(*codes.shape[:-1], -1)

    def unpack(self, packed: Bytes, high: Bytes) -> F32:
        """The inverse of both."""
        low = np.concatenate([packed >> (self.low_bits * k) & (1 << self.low_bits) - 1 for k in range(self.parts)], axis=-1)
        if not self.bits_ % 2:
            return low.astype(np.float32)
        halves = high.reshape(*high.shape[:-1], -1, 1, self.unit) >> np.array([[0], [4]], np.uint8)
        nibbles = halves.reshape(*high.shape[:-1], -1)[..., : packed.shape[-1]]
        top = np.concatenate([nibbles >> k & 1 for k in range(self.parts)], axis=-1)
        return np.asarray(low | top << self.low_bits, np.float32)


class _TokenLevels(_Parts):
    """Rotated; x = scale * code + minimum, a token's own: codes, then f16 scales, then f16 minima."""

    @abstractmethod
    def run(self, head_dim: int) -> int:
        """Channels of a run: bytes of a token's codes."""

    @abstractmethod
    def view(self, codes: Bytes, run: int) -> Bytes:
        """The codes of a block as u8[page_size / n, n tokens, ..], a token's in order."""

    def block_bytes(self, page_size: int, head_dim: int) -> int:
        run = self.run(head_dim)
        return page_size * (run + self.high_run(run) + 4)

    def store(self, block: Bytes, slot: int, x: F32) -> None:
        run = self.run(len(x))
        *planes, tops = self._split(block, run)
        every = np.zeros(run * self.parts, np.uint8)
        tops[0, slot], tops[1, slot], every[: len(x)] = levels(x, self.most, self.cut)
        for plane, packed in zip(planes, (self.pack(every), self.pack_high(every)), strict=True):
            if len(plane):
                tokens = self.view(plane, len(packed))
                tokens[divmod(slot, tokens.shape[1])] = packed.reshape(tokens.shape[2:])

    def load(self, block: Bytes, head_dim: int) -> F32:
        run = self.run(head_dim)
        codes, high, tops = self._split(block, run)
        scale, low = tops.astype(np.float32)[:, :, None]
        top = self.view(high, self.high_run(run)).reshape(-1, self.high_run(run)) if len(high) else high
        return np.asarray(self.unpack(self.view(codes, run).reshape(-1, run), top)[:, :head_dim] * scale + low, np.float32)

    def _split(self, block: Bytes, run: int) -> tuple[Bytes, Bytes, npt.NDArray[np.float16]]:
        """Codes, their highest bits, and f16[scale or minimum, page_size]."""
        high = self.high_run(run)
        tokens = len(block) // (run + high + 4)
        codes, size = tokens * run, tokens * (run + high)
        return block[:codes], block[codes:size], block[size:].view(np.float16).reshape(2, -1)


class TokenKeys(_TokenLevels):
    """Words `[page_size / 16][head_dim / 4 parts][16 tokens][4]`."""

    unit = 4

    def run(self, head_dim: int) -> int:
        return head_dim // self.parts

    def view(self, codes: Bytes, run: int) -> Bytes:
        return key_bytes(codes, run)


class TokenValues(_TokenLevels):
    """Bytes `[page_size / 4][channels of a run][4 tokens]`; runs are made of whole vectors of 16 channels."""

    unit = 8

    def run(self, head_dim: int) -> int:
        return run_channels(head_dim, self.parts)

    def view(self, codes: Bytes, run: int) -> Bytes:
        return value_bytes(codes, run)


class ChannelKeys(_Parts):
    """Rotated; x = scale * code + minimum, a channel's own over the page's tokens: written whole (law L3).

    Words `[page_size / 16][head_dim / 4 parts][16 tokens][4]`, those of the highest bits of 3, scales f16[head_dim], minima f16[head_dim].
    """

    unit = 4
    grouped = True

    def block_bytes(self, page_size: int, head_dim: int) -> int:
        run = head_dim // self.parts
        return page_size * (run + self.high_run(run)) + 4 * head_dim

    def store_group(self, block: Bytes, xs: F32) -> None:
        page_size, head_dim = xs.shape
        *planes, tops = self._split(block, head_dim)
        codes = np.empty(xs.shape, np.uint8)
        for c in range(head_dim):
            tops[0, c], tops[1, c], codes[:, c] = levels(xs[:, c], self.most, self.cut)
        for plane, packed in zip(planes, (self.pack(codes), self.pack_high(codes)), strict=True):
            if len(plane):
                key_bytes(plane, packed.shape[1])[:] = packed.reshape(page_size // LANES, LANES, -1, 4)

    def store(self, block: Bytes, slot: int, x: F32) -> None:
        raise TypeError(f"{self.name} keys are written a page at a time")

    def load(self, block: Bytes, head_dim: int) -> F32:
        codes, high, tops = self._split(block, head_dim)
        scale, low = tops.astype(np.float32)
        run = head_dim // self.parts
        top = key_bytes(high, self.high_run(run)).reshape(-1, self.high_run(run)) if len(high) else high
        return np.asarray(self.unpack(key_bytes(codes, run).reshape(-1, run), top) * scale + low, np.float32)

    def _split(self, block: Bytes, head_dim: int) -> tuple[Bytes, Bytes, npt.NDArray[np.float16]]:
        """Codes, their highest bits, and f16[scale or minimum, head_dim]."""
        run = head_dim // self.parts
        size = len(block) - 4 * head_dim
        codes = size // (run + self.high_run(run)) * run
        return block[:codes], block[codes:size], block[size:].view(np.float16).reshape(2, -1)


class Int4TokenKeys(TokenKeys):
    name = "int4-token"
    bits_ = 4


class Int4TokenValues(TokenValues):
    name = "int4-token"
    bits_ = 4


class Int4Keys(ChannelKeys):
    name = "int4"
    bits_ = 4


class Int4Values(TokenValues):
    """The tokens' own levels, but read once the page's keys are: recent tokens are read in 16 bits."""

    name = "int4"
    bits_ = 4
    grouped = True


class Int3Keys(ChannelKeys):
    name = "int3"
    bits_ = 3


class Int3Values(TokenValues):
    name = "int3"
    bits_ = 3
    grouped = True


class Int2Keys(ChannelKeys):
    """Four codes over the middle seven eighths of the range lose less than over all of it; with more bits that is not so."""

    name = "int2"
    bits_ = 2
    cut = 1 / 16


class Int2Values(TokenValues):
    name = "int2"
    bits_ = 2
    cut = 1 / 16
    grouped = True
