"""Parameters of the Triton templates over the paged KV cache. A kernel serves layers of one format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.runtime.kv_blocks import Block, NestedKeys, NestedValues
from mlsdc.runtime.kv_format import KvFormat, KvGeometry, format_named
from mlsdc.runtime.kv_levels import ChannelKeys, TokenKeys, TokenValues
from mlsdc.runtime.step import BLOCK, Limits
from mlsdc.templates.params_pages import OverPages
from mlsdc.templates.params_triton import digest, power_of_two

TRITON_FORMATS = ("bf16", "int8", "fp8", "int8n", "int4-token", "int4", "int3", "int2")  # that there are fragments for
TOPS = {"bf16": 0.0, "int8": 127.0, "int8n": 127.0, "fp8": 448.0}  # what a token's scale takes its largest channel to; others have levels


def code_bits(block: Block) -> int:
    """Bits of a code in a byte of the first plane."""
    if isinstance(block, TokenKeys | TokenValues | ChannelKeys):
        return block.low_bits
    return 4 if block.name == "int8n" else 16 if block.name == "bf16" else 8


def code_top(block: Block) -> float:
    """What a token's scale takes its largest channel to; of levels the largest code."""
    return float(block.most) if isinstance(block, TokenKeys | TokenValues | ChannelKeys) else TOPS[block.name]


def codes_of(block: Block) -> str:
    return "int8" if block.name == "int8n" else block.name if block.name in TOPS else "levels"


def code_cut(block: Block) -> float:
    """Of levels: the share of a range that is left to each side of the codes (runtime/kv_levels.py)."""
    return block.cut if isinstance(block, TokenKeys | TokenValues | ChannelKeys) else 0.0


@dataclass(frozen=True)
class Paged(OverPages):
    """What every kernel over pages knows: a page, its layers' format (`int8/fp8` where keys and values differ), a step's limits."""

    template: ClassVar[str]

    geometry: KvGeometry
    limits: Limits
    format: str

    def named(self, *parts: object) -> str:
        g = self.geometry
        name = self.format.replace("/", "_").replace("-", "")
        extra = "".join(f"_{part}" for part in parts if part)
        return f"{self.template}_{name}_p{g.page_size}_k{g.num_kv_heads}_d{g.head_dim}{extra}_{digest(self)}"

    @property
    def key(self) -> str:
        return self.named()

    @property
    def kv(self) -> KvFormat:
        return format_named(self.format)

    @property
    def keys(self) -> str:
        """Fragments that read and write keys: bf16, packed (a scale, or levels, a token), nested (int8 in two planes) or channel (levels a
        channel)."""
        if isinstance(self.kv.keys, ChannelKeys):
            return "channel"
        return {"bf16": "bf16", "int8n": "nested"}.get(self.kv.keys.name, "packed")

    @property
    def values(self) -> str:
        """Fragments that read and write values: bf16, packed or nested."""
        return {"bf16": "bf16", "int8n": "nested"}.get(self.kv.values.name, "packed")

    @property
    def key_codes(self) -> str:
        """What a code stands for: int8, fp8 or levels."""
        return codes_of(self.kv.keys)

    @property
    def value_codes(self) -> str:
        return codes_of(self.kv.values)

    @property
    def key_bits(self) -> int:
        return code_bits(self.kv.keys)

    @property
    def value_bits(self) -> int:
        return code_bits(self.kv.values)

    @property
    def key_top(self) -> float:
        return code_top(self.kv.keys)

    @property
    def value_top(self) -> float:
        return code_top(self.kv.values)

    @property
    def key_cut(self) -> float:
        """Of levels: the share of a range that is left to each side of the codes."""
        return code_cut(self.kv.keys)

    @property
    def value_cut(self) -> float:
        return code_cut(self.kv.values)

    @property
    def key_words(self) -> int:
        """Words of a token's key in the first plane, 16 tokens side by side."""
        return self.geometry.head_dim * self.key_bits // 32

    @property
    def key_more(self) -> int:
        """The same of the second plane, behind the first: low nibbles of int8n, highest bits of int3; 0 where there is none."""
        block = self.kv.keys
        if isinstance(block, NestedKeys):
            return self.key_words
        return block.high_run(4 * self.key_words) // 4 if isinstance(block, TokenKeys | ChannelKeys) else 0

    @property
    def value_run(self) -> int:
        """Bytes of a token's value in the first plane (elements for bf16): of packed codes channels of a run."""
        block = self.kv.values
        return block.run(self.geometry.head_dim) if isinstance(block, TokenValues | NestedValues) else self.geometry.head_dim

    @property
    def value_more(self) -> int:
        """Bytes of a token in the second plane."""
        block = self.kv.values
        if isinstance(block, NestedValues):
            return self.value_run
        return block.high_run(self.value_run) if isinstance(block, TokenValues) else 0

    @property
    def value_quad(self) -> bool:
        """Whether the bytes of 4 tokens lie side by side."""
        return self.value_codes in ("int8", "levels")

    @property
    def key_numbers(self) -> int:
        """f16 numbers of a token behind the keys' codes: scale, minimum."""
        return {"bf16": 0, "channel": 0}.get(self.keys, 2 if self.key_codes == "levels" else 1)

    @property
    def value_numbers(self) -> int:
        return 0 if self.values == "bf16" else 2 if self.value_codes == "levels" else 1

    @property
    def head_bytes(self) -> int:
        return self.geometry.format_bytes(self.kv)[2]

    @property
    def k_bytes(self) -> int:
        return self.geometry.format_bytes(self.kv)[0]

    @property
    def heads_block(self) -> int:
        return power_of_two(self.geometry.num_kv_heads)


@dataclass(frozen=True)
class AttendSplit(Paged):
    """`attend_split`: softmax(q k^T) v of a tile of rows over one split of the positions, as unnormalised (m, l, acc).

    A tile is up to `rows_per_tile` rows of one sequence times the query heads of one kv head, padded to `tile_rows` for the tensor
    cores. A split is `blocks_per_split` blocks of 64 positions; splits start at fixed positions, whatever the batch (law L2).
    q and the probabilities are each the sum of two bf16 numbers: 16 bits of mantissa. Drafted rows read their ancestors by position, row by
    row, so that they have the bits of committed rows; `fast`: all slots as one block, masked, in the order of the slots.
    """

    template: ClassVar[str] = "attend_split"

    heads: int
    scale: float
    most_tile: int
    window: int = 0
    softcap: float = 0.0
    sinks: int = 0
    fast: bool = False
    min_splits: ClassVar[int] = 16
    coarse: ClassVar[bool] = False  # of nested formats the high plane alone

    @property
    def key(self) -> str:
        return self.named(f"h{self.heads}", f"m{self.tile_rows}", f"w{self.window}" if self.window else "",
                          "softcap" if self.softcap else "", f"s{self.sinks}" if self.sinks else "", "fast" if self.fast else "",
                          "coarse" if self.coarse else "")

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.heads // self.geometry.num_kv_heads

    @property
    def tile_rows(self) -> int:
        """Rows of a tile's dots: eight rows of a sequence (`fast`: sixteen) share one read of its keys, where that many fit."""
        return max(min(self.most_tile, power_of_two((16 if self.fast else 8) * self.group)), 16, power_of_two(self.group))

    @property
    def rows_per_tile(self) -> int:
        return self.tile_rows // self.group

    @property
    def max_tiles(self) -> int:
        """Tiles of the worst ragged batch: every sequence leaves its last tile nearly empty."""
        waste = min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens) * (self.rows_per_tile - 1)
        return (self.limits.max_num_batched_tokens + waste) // self.rows_per_tile

    @property
    def turn(self) -> int:
        """Positions of a turn of the loop over pages: keys with levels by channel are scored a page at a time; so are others beside values
        that are written in groups, whose 64 would not fit into an A100's registers with 128 channels."""
        return min(BLOCK, self.geometry.page_size) if self.kv.grouped else BLOCK

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
    def seqs_padded(self) -> int:
        return power_of_two(self.limits.max_num_seqs)

    @property
    def _max_blocks(self) -> int:
        return -(-(self.limits.max_model_len + self.limits.max_tree_nodes) // BLOCK)


@dataclass(frozen=True)
class AttendCoarse(AttendSplit):
    """The same over the high plane of a nested format, each byte as the middle of its 16."""

    coarse: ClassVar[bool] = True


@dataclass(frozen=True)
class AppendKv(Paged):
    """`append_kv`: rows' keys and values into pages and scratch, of a grouped format in 16 bits into the arena and scratch. With
    `columns` > 0 both are cut out of one fused projection, and the first 2 `half` channels of keys turn first; else k and v are ready."""

    template: ClassVar[str] = "append_kv"

    columns: int = 0
    k_start: int = 0
    v_start: int = 0
    half: int = 0

    @property
    def key(self) -> str:
        return self.named("rope" if self.fused else "")

    @property
    def fused(self) -> bool:
        return self.columns > 0


@dataclass(frozen=True)
class QuantiseKv(Paged):
    """`quantise_kv`: pages of a grouped format from their tokens' 16-bit forms: those that a step's rows fill, or that a commit of `layers`
    layers fills."""

    template: ClassVar[str] = "quantise_kv"

    layers: int = 0

    @property
    def key(self) -> str:
        return self.named(f"l{self.layers}" if self.layers else "")


@dataclass(frozen=True)
class SettleKv(Paged):
    """`settle_kv`: a step's committed rows that are among the last of their sequence from the arena into its ring."""

    template: ClassVar[str] = "settle_kv"


@dataclass(frozen=True)
class AttendCombine:
    """`attend_combine`: a row's splits folded in index order and normalised, turned back where values lie `rotated`; `quantise`: into a8,
    all values, then all scales."""

    template: ClassVar[str] = "attend_combine"

    heads: int
    head_dim: int
    max_rows: int
    splits: int
    positions_per_split: int
    window: int = 0
    quantise: bool = False
    rotated: bool = False

    @property
    def key(self) -> str:
        extra = ("_turned" if self.rotated else "") + ("_a8" if self.quantise else "")
        return f"attend_combine_h{self.heads}_d{self.head_dim}_s{self.splits}{extra}_{digest(self)}"


@dataclass(frozen=True)
class Rotate:
    """`rotate`: the Hadamard rotation of rows of `heads` vectors of head_dim."""

    template: ClassVar[str] = "rotate"

    heads: int
    head_dim: int

    @property
    def key(self) -> str:
        return f"rotate_h{self.heads}_d{self.head_dim}"


@dataclass(frozen=True)
class Commit(Paged):
    """`commit`: tokens of `layers` layers that follow each other copied from slot to slot."""

    template: ClassVar[str] = "commit"

    layers: int

    @property
    def key(self) -> str:
        return self.named(f"l{self.layers}")
