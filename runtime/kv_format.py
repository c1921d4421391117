"""KV-cache formats: the bytes of a page, and the numpy oracle that reads and writes them.

A page holds `page_size` tokens of *all* layers of a level: `[layer][kv_head][K block | V block]`, every block at a fixed
offset (law L3: the bytes of a key depend on its position and the tokens only). A format says how one block looks. The
kernels of every target are generated for exactly these bytes; the functions here are what tests compare them with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mlsdc.runtime.errors import MlsdcError

LANES = 16  # keys are interleaved by 16 tokens: one vector lane per token, whatever the ISA


class KvFormat(ABC):
    """How the keys and values of one (layer, kv head) lie in a page. Stateless; one instance per name in `FORMATS`."""

    name: ClassVar[str]
    bits_per_element: ClassVar[float]

    @abstractmethod
    def k_block_bytes(self, page_size: int, head_dim: int) -> int: ...

    @abstractmethod
    def v_block_bytes(self, page_size: int, head_dim: int) -> int: ...

    @abstractmethod
    def write(self, k_block: npt.NDArray[np.uint8], v_block: npt.NDArray[np.uint8], slot: int, key: npt.NDArray[np.float32],
              value: npt.NDArray[np.float32]) -> None:
        """Store the token's key[head_dim] and value[head_dim] (f32) at `slot` of a page's blocks."""

    @abstractmethod
    def read(self, k_block: npt.NDArray[np.uint8], v_block: npt.NDArray[np.uint8], head_dim: int
             ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """The whole block dequantised: keys[page_size, head_dim] and values[page_size, head_dim] in f32."""


def to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """f32 -> bf16 bits, round to nearest even (NaN stays NaN)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Bf16(KvFormat):
    """Both as bf16. Keys: `[page_size/16][head_dim/2][16 tokens][2]`, so that a vector lane is a token and the score needs
    no horizontal sum; values: `[page_size][head_dim]`, so that a vector lane is a channel."""

    name = "bf16"
    bits_per_element = 16.0

    def k_block_bytes(self, page_size: int, head_dim: int) -> int:
        return 2 * page_size * head_dim

    v_block_bytes = k_block_bytes

    def write(self, k_block: npt.NDArray[np.uint8], v_block: npt.NDArray[np.uint8], slot: int, key: npt.NDArray[np.float32],
              value: npt.NDArray[np.float32]) -> None:
        head_dim = len(key)
        keys = k_block.view(np.uint16).reshape(-1, head_dim // 2, LANES, 2)
        keys[slot // LANES, :, slot % LANES, :] = to_bf16(key).reshape(-1, 2)
        v_block.view(np.uint16).reshape(-1, head_dim)[slot] = to_bf16(value)

    def read(self, k_block: npt.NDArray[np.uint8], v_block: npt.NDArray[np.uint8], head_dim: int
             ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        keys = k_block.view(np.uint16).reshape(-1, head_dim // 2, LANES, 2).transpose(0, 2, 1, 3).reshape(-1, head_dim)
        return from_bf16(keys), from_bf16(v_block.view(np.uint16).reshape(-1, head_dim))


FORMATS: dict[str, KvFormat] = {"bf16": Bf16()}


@dataclass(frozen=True)
class KvGeometry:
    """A level's page: format, page size in tokens, and the shape of what one token stores. The artifact's manifest carries it."""

    format: str
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise MlsdcError(f"kv format: '{self.format}' is not known; formats are {', '.join(FORMATS)}")
        if self.page_size not in (16, 32, 64):
            raise MlsdcError(f"kv page_size: {self.page_size}, expected 16, 32 or 64")
        if self.head_dim % 16:
            raise MlsdcError(f"kv head_dim: {self.head_dim}, expected a multiple of 16")

    @property
    def kv(self) -> KvFormat:
        return FORMATS[self.format]

    @property
    def k_block_bytes(self) -> int:
        return self.kv.k_block_bytes(self.page_size, self.head_dim)

    @property
    def v_block_bytes(self) -> int:
        return self.kv.v_block_bytes(self.page_size, self.head_dim)

    @property
    def head_bytes(self) -> int:
        """Bytes of one (layer, kv head) in a page: its K block, then its V block."""
        return self.k_block_bytes + self.v_block_bytes

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.num_kv_heads * self.head_bytes

    @property
    def bytes_per_token(self) -> float:
        return self.page_bytes / self.page_size

    def k_offset(self, layer: int, head: int) -> int:
        """Byte offset of a (layer, kv head)'s K block in a page; its V block follows at + k_block_bytes."""
        return (layer * self.num_kv_heads + head) * self.head_bytes

    def blocks(self, page: npt.NDArray[np.uint8], layer: int, head: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Views (K block, V block) of a page given as u8[page_bytes]."""
        k = self.k_offset(layer, head)
        v = k + self.k_block_bytes
        return page[k:v], page[v:v + self.v_block_bytes]
