"""KV-cache formats by name, and the geometry of a page.

A page holds `page_size` tokens of *all* layers of a level: `[layer][kv_head][K block | V block]`, every block at a fixed
offset (law L3: the bytes of a key depend on its position and the tokens only). A format says how one block looks
(kv_blocks.py, kv_levels.py). The kernels of every target are generated for exactly these bytes; the functions here are what tests
compare them with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.kv_blocks import (
    LANES,
    Bf16Keys,
    Bf16Values,
    Block,
    Bytes,
    Fp8Keys,
    Fp8Values,
    Int8Keys,
    Int8Values,
    NestedKeys,
    NestedValues,
)
from mlsdc.runtime.kv_levels import Int2Keys, Int2Values, Int3Keys, Int3Values, Int4Keys, Int4TokenKeys, Int4TokenValues, Int4Values
from mlsdc.runtime.kv_numbers import F32, from_bf16, to_bf16
from mlsdc.runtime.kv_tail import Tail

__all__ = ["FORMATS", "LANES", "KvFormat", "KvGeometry", "format_named", "from_bf16", "format_text", "parse_format", "to_bf16"]

RECENT = 32  # R of law L3: a tree's path may be so deep
WIDE_PAGE = 16  # tokens of a 16-bit page: so many first ones of a sequence stay in 16 bits
HEAD_ALIGN = 64  # bytes: every (layer, kv head) of a page starts on a cache line


@dataclass(frozen=True)
class KvFormat:
    """How a layer's keys and values lie in a page; `name` is theirs if both are alike, else `keys/values`."""

    keys: Block
    values: Block

    @property
    def name(self) -> str:
        return self.keys.name if self.keys.name == self.values.name else f"{self.keys.name}/{self.values.name}"

    @property
    def grouped(self) -> bool:
        """Whether pages are written whole and recent tokens are read in 16 bits."""
        return self.keys.grouped or self.values.grouped

    def bits_per_element(self, page_size: int, head_dim: int) -> float:
        """Mean of keys and values, scales included."""
        return (self.keys.bits(page_size, head_dim) + self.values.bits(page_size, head_dim)) / 2

    def write(self, k_block: Bytes, v_block: Bytes, slot: int, key: F32, value: F32) -> None:
        """Store the token's key[head_dim] and value[head_dim] (f32) at `slot` of a page's blocks."""
        self.keys.write(k_block, slot, key)
        self.values.write(v_block, slot, value)

    def read(self, k_block: Bytes, v_block: Bytes, head_dim: int, *, coarse: bool = False) -> tuple[F32, F32]:
        """The whole block dequantised: keys[page_size, head_dim] and values[page_size, head_dim] in f32; `coarse` as Block.coarse."""
        if coarse:
            return self.keys.coarse(k_block, head_dim), self.values.coarse(v_block, head_dim)
        return self.keys.read(k_block, head_dim), self.values.read(v_block, head_dim)


_EVERY = (
    (Bf16Keys(), Bf16Values()), (Int8Keys(), Int8Values()), (Fp8Keys(), Fp8Values()), (NestedKeys(), NestedValues()),
    (Int4TokenKeys(), Int4TokenValues()), (Int4Keys(), Int4Values()), (Int3Keys(), Int3Values()), (Int2Keys(), Int2Values()))
FORMATS: dict[str, KvFormat] = {keys.name: KvFormat(keys, values) for keys, values in _EVERY}


def format_named(name: str) -> KvFormat:
    """The format called `int8` or, where keys and values differ, `int8/fp8`. Raises MlsdcError."""
    keys, slash, values = name.partition("/")
    for part in (keys, values) if slash else (keys,):
        if part not in FORMATS:
            raise MlsdcError(f"kv format: '{part}' is not known; formats are {', '.join(FORMATS)}")
    return KvFormat(FORMATS[keys].keys, FORMATS[values or keys].values)


@cache
def parse_format(text: str) -> tuple[KvFormat, dict[int, KvFormat]]:
    """A level's formats from their text: that of most layers, and those of others by layer. Raises MlsdcError.

    `int8`, `int8/fp8`, `int8@0.29=bf16` (layers 0 and 29 are bf16), `int8@0=bf16@3.4=fp8`.
    """
    name, *rest = text.split("@")
    others: dict[int, KvFormat] = {}
    for part in rest:
        layers, equals, other = part.partition("=")
        if not equals or not re.fullmatch(r"\d+(\.\d+)*", layers):
            raise MlsdcError(f"kv format: '{text}': expected layers and a format such as @0.29=bf16, found '@{part}'")
        for layer in map(int, layers.split(".")):
            if layer in others:
                raise MlsdcError(f"kv format: '{text}' gives layer {layer} two formats")
            others[layer] = format_named(other)
    return format_named(name), others


def format_text(name: str, others: dict[int, str]) -> str:
    """The inverse of `parse_format`, canonical: layers in order, formats in the order of their first layer, none that repeats `name`."""
    by_format: dict[str, list[int]] = {}
    for layer, other in sorted(others.items()):
        if other != name:
            by_format.setdefault(other, []).append(layer)
    return name + "".join(f"@{'.'.join(map(str, layers))}={other}" for other, layers in by_format.items())


@dataclass(frozen=True)
class KvGeometry:
    """A level's page: format, page size in tokens, and the shape of what one token stores. The artifact's manifest carries it.

    `format` is the text of `parse_format`: layers may differ.
    """

    format: str
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        _, others = parse_format(self.format)
        if self.page_size not in (16, 32, 64):
            raise MlsdcError(f"kv page_size: {self.page_size}, expected 16, 32 or 64")
        if self.head_dim % 16:
            raise MlsdcError(f"kv head_dim: {self.head_dim}, expected a multiple of 16")
        if others and max(others) >= self.num_layers:
            raise MlsdcError(f"kv format: '{self.format}' names layer {max(others)}, there are {self.num_layers}")

    @property
    def kv(self) -> KvFormat:
        """The format of most layers."""
        return parse_format(self.format)[0]

    def layer_format(self, layer: int) -> KvFormat:
        kv, others = parse_format(self.format)
        return others.get(layer, kv)

    def format_bytes(self, kv: KvFormat) -> tuple[int, int, int]:
        """Bytes of one (layer, kv head) in a page in a format: its K block, its V block, and both rounded up to a cache line."""
        k, v = (block.block_bytes(self.page_size, self.head_dim) for block in (kv.keys, kv.values))
        return k, v, -(-(k + v) // HEAD_ALIGN) * HEAD_ALIGN

    def layer_bytes(self, layer: int) -> tuple[int, int, int]:
        """`format_bytes` of a layer's format."""
        return self.format_bytes(self.layer_format(layer))

    @property
    def grouped(self) -> bool:
        """Whether a page is a group: it is written once full, and all layers' recent tokens lie in 16 bits in wide pages (law L3)."""
        kv, others = parse_format(self.format)
        return kv.grouped or any(other.grouped for other in others.values())

    @cached_property
    def tail(self) -> Tail | None:
        """Of a grouped geometry: which tokens a sequence keeps in 16 bits."""
        return Tail(RECENT, self.page_size, WIDE_PAGE) if self.grouped else None

    @cached_property
    def wide(self) -> KvGeometry | None:
        """Of a grouped geometry: that of the 16-bit pages of tails and scratch slabs."""
        return KvGeometry("bf16", self.tail.page_size, self.num_layers, self.num_kv_heads, self.head_dim) if self.tail else None

    @property
    def k_block_bytes(self) -> int:
        """Of the format of most layers, as `v_block_bytes` and `head_bytes` are."""
        return self.format_bytes(self.kv)[0]

    @property
    def v_block_bytes(self) -> int:
        return self.format_bytes(self.kv)[1]

    @property
    def head_bytes(self) -> int:
        """From one (layer, kv head) in a page to the next: its K block, its V block, rounded up to a cache line."""
        return self.format_bytes(self.kv)[2]

    def layer_runs(self) -> list[tuple[int, int, KvFormat]]:
        """Layers that follow each other and have one format: (first, how many, format)."""
        runs: list[tuple[int, int, KvFormat]] = []
        for layer in range(self.num_layers):
            kv = self.layer_format(layer)
            if runs and runs[-1][2] == kv:
                first, count, _ = runs.pop()
                runs.append((first, count + 1, kv))
            else:
                runs.append((layer, 1, kv))
        return runs

    @cached_property
    def _layer_offsets(self) -> tuple[int, ...]:
        """Where each layer starts in a page, and where the last one ends."""
        return (0, *accumulate(self.num_kv_heads * self.layer_bytes(layer)[2] for layer in range(self.num_layers)))

    @property
    def page_bytes(self) -> int:
        return self._layer_offsets[-1]

    @property
    def bytes_per_token(self) -> float:
        return self.page_bytes / self.page_size

    def k_offset(self, layer: int, head: int) -> int:
        """Byte offset of a (layer, kv head)'s K block in a page; its V block follows at once."""
        return self._layer_offsets[layer] + head * self.layer_bytes(layer)[2]

    def blocks(self, page: Bytes, layer: int, head: int) -> tuple[Bytes, Bytes]:
        """Views (K block, V block) of a page given as u8[page_bytes]."""
        k = self.k_offset(layer, head)
        k_bytes, v_bytes, _ = self.layer_bytes(layer)
        return page[k : k + k_bytes], page[k + k_bytes : k + k_bytes + v_bytes]

    def write(self, page: Bytes, layer: int, head: int, slot: int, key: F32, value: F32) -> None:
        """Store a token's key[head_dim] and value[head_dim] in a page given as u8[page_bytes]."""
        self.layer_format(layer).write(*self.blocks(page, layer, head), slot, key, value)

    def write_group(self, page: Bytes, layer: int, head: int, keys: F32, values: F32) -> None:
        """Fill a (layer, kv head) of a page with all its tokens' keys and values, f32[page_size, head_dim]."""
        kv = self.layer_format(layer)
        for block, vectors, store in zip(self.blocks(page, layer, head), (keys, values), (kv.keys, kv.values), strict=True):
            store.write_group(block, vectors)

    def read(self, page: Bytes, layer: int, head: int, *, coarse: bool = False) -> tuple[F32, F32]:
        """A page's keys[page_size, head_dim] and values[page_size, head_dim] of a (layer, kv head), in f32."""
        return self.layer_format(layer).read(*self.blocks(page, layer, head), self.head_dim, coarse=coarse)
