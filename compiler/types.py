"""Types of IR values: dtypes, symbolic dims, tensors, and the two stateful views of a step (KV cache and tree)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias


class DType(enum.StrEnum):
    """Element types. `q8`, `q4`, `f8` are packed weights and `a8` quantised activations: logical shapes, groups of 32 along the last axis.

    q8: int8 values, one f16 scale a group. q4: 4-bit values, f16 scale and f16 minimum a group (w = scale * q + min).
    f8: e4m3 values, one f32 scale a row (w = scale * e4m3), no groups.
    a8: int8 values with one f32 scale = max|x| / 127 a group of a row. a16: a8, and a second a8 of
    what that leaves in a few groups of large values (the op's `fine`), whose rounding is most of the error.
    """

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I8 = "i8"
    U8 = "u8"
    I32 = "i32"
    I64 = "i64"
    BOOL = "bool"
    Q8 = "q8"
    Q4 = "q4"
    F8 = "f8"
    A8 = "a8"
    A16 = "a16"

    @property
    def packed(self) -> bool:
        return self in (DType.Q8, DType.Q4, DType.F8, DType.A8, DType.A16)


GROUP = 32  # elements that share a scale in q8, q4 and a8


@dataclass(frozen=True, order=True)
class Dim:
    """A symbolic dimension with its inclusive range, e.g. Dim("rows", 1, 512)."""

    name: str
    lo: int
    hi: int

    def __str__(self) -> str:
        return self.name


Size: TypeAlias = "int | Dim"


@dataclass(frozen=True)
class TensorType:
    """`f32[rows, 576]`."""

    dtype: DType
    shape: tuple[Size, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def rank(self) -> int:
        return len(self.shape)

    def with_shape(self, *shape: Size) -> TensorType:
        return TensorType(self.dtype, shape)

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(dtype, self.shape)


@dataclass(frozen=True)
class KvType:
    """A level's paged KV cache as this step sees it: `kv<bf16, page=32, layers=30, heads=3, dim=64>`.

    A value of this type is *threaded*: `append_kv` takes one and gives the next, so that the order of writes and reads is data flow.
    """

    format: str
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        name = f'"{self.format}"' if "@" in self.format else self.format
        return f"kv<{name}, page={self.page_size}, layers={self.num_layers}, heads={self.num_kv_heads}, dim={self.head_dim}>"


@dataclass(frozen=True)
class TreeType:
    """What each row may see: its sequence, its position, its scratch slot and its ancestor word (`tree`)."""

    def __str__(self) -> str:
        return "tree"


Type: TypeAlias = "TensorType | KvType | TreeType"
