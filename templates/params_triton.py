"""Parameters of the Triton templates: frozen dataclasses, one a template, everything a template may ask for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import ClassVar

from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.step import BLOCK, Limits


def digest(params: object) -> str:
    """Eight hex digits of a dataclass's fields: they make a readable key unique."""
    text = ",".join(f"{f.name}={getattr(params, f.name)!r}" for f in fields(params))  # type: ignore[arg-type]
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class AttendSplit:
    """`attend_split`: softmax(q k^T) v of a tile of rows over one split of the positions, as unnormalised (m, l, acc).

    A tile is up to `rows_per_tile` rows of one sequence times the query heads of one kv head, padded to `tile_rows` for the tensor
    cores. A split is `blocks_per_split` blocks of 64 positions; splits start at fixed positions, whatever the batch (law L2).
    `terms` 2: q and the probabilities are each the sum of two bf16 numbers (16 bits of mantissa), 1: one (8 bits).
    """

    template: ClassVar[str] = "attend_split"

    geometry: KvGeometry
    limits: Limits
    heads: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    terms: int = 2
    min_splits: ClassVar[int] = 16

    @property
    def key(self) -> str:
        g = self.geometry
        extra = (f"_w{self.window}" if self.window else "") + ("_softcap" if self.softcap else "")
        return f"attend_split_{g.format}_p{g.page_size}_h{self.heads}k{g.num_kv_heads}_d{g.head_dim}{extra}_{digest(self)}"

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.heads // self.geometry.num_kv_heads

    @property
    def tile_rows(self) -> int:
        """Rows of a tile's dots: eight rows of a sequence share one read of its keys, where 64 dot rows hold them."""
        return min(64, max(16, power_of_two(8 * self.group)))

    @property
    def rows_per_tile(self) -> int:
        return self.tile_rows // self.group

    @property
    def max_tiles(self) -> int:
        """Tiles of the worst ragged batch: every sequence leaves its last tile nearly empty."""
        waste = min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens) * (self.rows_per_tile - 1)
        return (self.limits.max_num_batched_tokens + waste) // self.rows_per_tile

    @property
    def blocks_per_split(self) -> int:
        return -(-self._max_blocks // self.min_splits)

    @property
    def splits(self) -> int:
        return -(-self._max_blocks // self.blocks_per_split)

    @property
    def most_programs(self) -> int:
        """Programs of the worst batch: a launch for more rows than there are tiles need not have more."""
        return self.max_tiles * self.geometry.num_kv_heads * self.splits

    @property
    def pages_per_seq(self) -> int:
        return self.limits.pages_per_seq(self.geometry.page_size)

    @property
    def scratch_pages(self) -> int:
        return self.limits.scratch_pages(self.geometry.page_size)

    @property
    def seqs_padded(self) -> int:
        return power_of_two(self.limits.max_num_seqs)

    @property
    def _max_blocks(self) -> int:
        return -(-(self.limits.max_model_len + self.limits.max_tree_nodes) // BLOCK)


@dataclass(frozen=True)
class Rope:
    """`rope`: RoPE of `heads` heads that start at column `start` of rows of `columns` f32, by a table of [2, head_dim / 2] a row."""

    template: ClassVar[str] = "rope"

    columns: int
    start: int
    heads: int
    head_dim: int
    max_rows: int

    @property
    def key(self) -> str:
        return f"rope_c{self.columns}_at{self.start}_h{self.heads}_d{self.head_dim}_{digest(self)}"


@dataclass(frozen=True)
class AppendKv:
    """`append_kv`: rows' keys and values into pages and scratch. With `columns` > 0 both are cut out of one fused projection, and keys are
    turned by RoPE first; else k and v are [rows, kv_heads, head_dim], ready."""

    template: ClassVar[str] = "append_kv"

    geometry: KvGeometry
    limits: Limits
    columns: int = 0
    k_start: int = 0
    v_start: int = 0

    @property
    def key(self) -> str:
        g = self.geometry
        return f"append_kv_{g.format}_p{g.page_size}_k{g.num_kv_heads}_d{g.head_dim}{'_rope' if self.fused else ''}_{digest(self)}"

    @property
    def fused(self) -> bool:
        return self.columns > 0

    @property
    def pages_per_seq(self) -> int:
        return self.limits.pages_per_seq(self.geometry.page_size)

    @property
    def scratch_pages(self) -> int:
        return self.limits.scratch_pages(self.geometry.page_size)


@dataclass(frozen=True)
class AttendCombine:
    """`attend_combine`: a row's splits folded in index order and normalised; `quantise`: into a8, all values, then all scales."""

    template: ClassVar[str] = "attend_combine"

    heads: int
    head_dim: int
    max_rows: int
    splits: int
    positions_per_split: int
    window: int = 0
    quantise: bool = False

    @property
    def key(self) -> str:
        return f"attend_combine_h{self.heads}_d{self.head_dim}_s{self.splits}{'_a8' if self.quantise else ''}_{digest(self)}"


@dataclass(frozen=True)
class Commit:
    """`commit`: `max_commits` tokens of all layers copied from slot to slot."""

    template: ClassVar[str] = "commit"

    geometry: KvGeometry
    max_commits: int

    @property
    def key(self) -> str:
        g = self.geometry
        return f"commit_{g.format}_p{g.page_size}_l{g.num_layers}_k{g.num_kv_heads}_d{g.head_dim}_{digest(self)}"

    @property
    def heads_block(self) -> int:
        return power_of_two(self.geometry.num_kv_heads)
