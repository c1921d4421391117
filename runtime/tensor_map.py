"""Tensor maps: how a kernel's ABI says that it copies tiles of a tensor by TMA, and what the driver is told of the tensor.

An argument `w_map: map bf16[128, 64]` is a tensor of bf16 numbers in dense rows, read by tiles of 128 x 64. In the kernel's parameter
table it is a CUtensorMap (128 bytes, at a multiple of 64), then the tensor's sizes (i32 each) and strides in elements (i64 each), outermost
first: what Triton makes of a `tensordesc` from sm_90 on. The limits are those of cuTensorMapEncodeTiled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

MAP_BYTES, MAP_ALIGNMENT = 128, 64
ELEMENTS = {"u8": (0, 1), "i8": (0, 1), "i32": (3, 4), "f16": (6, 2), "f32": (7, 4), "bf16": (9, 2)}  # CUtensorMapDataType, bytes
SPAN = 128  # bytes of a row of a box, at most: what the widest swizzle covers
SWIZZLE = {128: 3, 64: 2, 32: 1}  # bytes of a row of a box -> CUtensorMapSwizzle
MOST_BOX, MOST_RANK, MOST_SIZE, MOST_STRIDE = 256, 5, 2**32, 2**40
_TYPE = re.compile(r"map (\w+)\[([\d, ]+)\]")


@dataclass(frozen=True)
class Tiles:
    """Tiles of `shape` of a tensor of `dtype`, copied in one piece or in several boxes."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def element_type(self) -> int:
        return ELEMENTS[self.dtype][0]

    @property
    def element_bytes(self) -> int:
        return ELEMENTS[self.dtype][1]

    @property
    def box(self) -> tuple[int, ...]:
        """What one instruction copies: rows of at most SPAN bytes."""
        return (*self.shape[:-1], min(self.shape[-1], SPAN // self.element_bytes))

    @property
    def swizzle(self) -> int:
        return SWIZZLE.get(self.box[-1] * self.element_bytes, 0)

    def unfit(self, shape: Sequence[int], address: int = 0) -> str | None:
        """Why a dense tensor of `shape` at `address` cannot be read so; None if it can."""
        if not len(shape) == len(self.shape) <= MOST_RANK:
            return f"{len(shape)} axes, tiles have {len(self.shape)} (at most {MOST_RANK})"
        if address % 16:
            return f"it lies at {address:#x}, not at a multiple of 16"
        if any(not 0 < size <= MOST_SIZE for size in shape):
            return f"a size of {list(shape)} is not 1 to {MOST_SIZE}"
        steps = [stride * self.element_bytes for stride in strides(shape)[:-1]]
        if any(step % 16 or step >= MOST_STRIDE for step in steps):
            return f"its strides, {steps} bytes, are not multiples of 16 below {MOST_STRIDE}"
        if max(self.box) > MOST_BOX or self.box[-1] * self.element_bytes % 16:
            return f"boxes of {list(self.box)} x {self.element_bytes} bytes: at most {MOST_BOX} a side, rows of a multiple of 16 bytes"
        return None


def tiles_of(type_: str) -> Tiles | None:
    """The tiles of an ABI type `map bf16[128, 64]`; None for a type of another kind."""
    found = _TYPE.fullmatch(type_)
    return Tiles(found[1], tuple(int(size) for size in found[2].split(","))) if found and found[1] in ELEMENTS else None


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a dense tensor, in elements, outermost first."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def param_bytes(type_: str) -> tuple[int, ...]:
    """Sizes of the parameters that an argument of an ABI type is in the kernel's table."""
    tiles = tiles_of(type_)
    if tiles is not None:
        rank = len(tiles.shape)
        return (MAP_BYTES, *[4] * rank, *[8] * rank)
    return ({"i32": 4, "f32": 4}.get(type_, 8),)
