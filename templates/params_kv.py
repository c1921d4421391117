"""Parameters of the TIR templates over the paged KV cache. A kernel serves layers of one format: `keys` and `values` name its fragments."""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

from mlsdc.runtime.kv_blocks import NestedKeys, NestedValues, run_channels
from mlsdc.runtime.kv_format import KvFormat, KvGeometry
from mlsdc.runtime.kv_levels import ChannelKeys, TokenKeys, TokenValues
from mlsdc.runtime.kv_numbers import rotation_size
from mlsdc.runtime.step import Limits
from mlsdc.templates.params import TirParams, named, padded
from mlsdc.templates.params_pages import OverPages

SPAN = 256  # positions of one attention work item: a multiple of the block of 64 (law L2: spans and blocks are by position)
DOTS = ("int8", "int8n", "int4-token", "int4", "int3", "int2")  # key and value formats that meet integer dots
FRAGMENTS_OF_KEYS = {"int4-token": "token_levels", "int4": "channel_levels", "int3": "channel_levels", "int2": "channel_levels"}
REGISTERS = {"vnni512": 24}  # accumulators of 16 lanes that stay in registers, by kind of dot; other machines:
FEW_REGISTERS = 6


@dataclass(frozen=True)
class Paged(OverPages, TirParams):
    """What every kernel over pages knows: the geometry of a page, a layer whose format it is for, and the limits of a step."""

    geometry: KvGeometry = named("")  # type: ignore[assignment]
    limits: Limits = named("")  # type: ignore[assignment]
    format: KvFormat = named("")  # type: ignore[assignment]

    @property
    def keys(self) -> str:
        return self.format.keys.name

    @property
    def values(self) -> str:
        return self.format.values.name

    @property
    def page_size(self) -> int:
        return self.geometry.page_size

    @property
    def page_bytes(self) -> int:
        return self.geometry.page_bytes

    @property
    def head_bytes(self) -> int:
        return self.geometry.format_bytes(self.format)[2]

    @property
    def k_block_bytes(self) -> int:
        return self.geometry.format_bytes(self.format)[0]

    @property
    def kv_heads(self) -> int:
        return self.geometry.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.geometry.head_dim

    @property
    def rotation(self) -> int:
        return rotation_size(self.head_dim)

    @property
    def rotation_strides(self) -> tuple[int, ...]:
        """Distances of the rotation's pairs that lie in different vectors of 16 channels."""
        return tuple(2**n for n in range(4, self.rotation.bit_length() - 1))

    @property
    def key_fragments(self) -> str:
        return FRAGMENTS_OF_KEYS.get(self.keys, self.keys)

    @property
    def value_fragments(self) -> str:
        return "levels" if isinstance(self.format.values, TokenValues) else self.values

    @property
    def v_block_bytes(self) -> int:
        return self.geometry.format_bytes(self.format)[1]

    @property
    def key_code_bytes(self) -> int:
        """Of one token's key, scales left out."""
        return self.head_dim * 2 if self.keys == "bf16" else self.head_dim // self.key_parts

    @property
    def value_code_bytes(self) -> int:
        if isinstance(self.format.values, TokenValues | NestedValues):
            return self.run_channels
        return self.head_dim * 2 if self.values == "bf16" else self.head_dim

    @property
    def key_parts(self) -> int:
        """Codes in a byte, but for the highest bits of 3."""
        return self.format.keys.parts if isinstance(self.format.keys, TokenKeys | ChannelKeys | NestedKeys) else 1

    @property
    def key_most(self) -> int:
        """The largest code."""
        assert isinstance(self.format.keys, TokenKeys | ChannelKeys)
        return self.format.keys.most

    @property
    def key_cut(self) -> float:
        """Share of the range that is left to each side of the codes."""
        assert isinstance(self.format.keys, TokenKeys | ChannelKeys)
        return self.format.keys.cut

    @property
    def value_cut(self) -> float:
        assert isinstance(self.format.values, TokenValues)
        return self.format.values.cut

    @property
    def key_high(self) -> int:
        """Words of a token's plane of highest bits, 0 where there is none."""
        assert isinstance(self.format.keys, TokenKeys | ChannelKeys)
        return self.format.keys.high_run(self.head_dim // self.key_parts) // 4

    @property
    def key_codes(self) -> int:
        """Bytes of all codes of a page's K block: where the numbers behind them begin."""
        return self.page_size * (self.head_dim // self.key_parts + 4 * self.key_high)

    @property
    def value_parts(self) -> int:
        assert isinstance(self.format.values, TokenValues | NestedValues)
        return self.format.values.parts

    @property
    def value_most(self) -> int:
        assert isinstance(self.format.values, TokenValues)
        return self.format.values.most

    @property
    def value_high(self) -> int:
        """Channels of a token's plane of highest bits, 0 where there is none."""
        assert isinstance(self.format.values, TokenValues)
        return self.format.values.high_run(self.run_channels)

    @property
    def value_codes(self) -> int:
        """Bytes of all codes of a page's V block."""
        if isinstance(self.format.values, NestedValues):
            return 2 * self.page_size * self.run_channels
        return self.page_size * (self.run_channels + self.value_high)

    @property
    def run_channels(self) -> int:
        """Channels of a run of packed values."""
        return run_channels(self.head_dim, self.value_parts)

    @property
    def kept_words(self) -> int:
        """Words that `prepare_q` keeps of a head's q: f32 where scales of channels come first, else two planes of int8, and some more."""
        return (self.head_dim if isinstance(self.format.keys, ChannelKeys) else self.head_dim // 2) + 16

    @property
    def max_groups(self) -> int:
        """Groups that one commit may fill."""
        return self.seqs * (1 + self.limits.max_tree_nodes // self.page_size)

    @property
    def rows_padded(self) -> int:
        return padded(self.limits.max_num_batched_tokens, 8)

    @property
    def seqs(self) -> int:
        return self.limits.max_num_seqs

    @property
    def max_commits(self) -> int:
        return self.limits.max_num_batched_tokens

    @property
    def span(self) -> int:
        return SPAN

    @property
    def spans(self) -> int:
        return -(-self.limits.max_model_len // SPAN)

    @property
    def max_items(self) -> int:
        """Attention work items of the largest step: every few rows over every span."""
        return (self.rows_padded // self.item_rows + self.seqs) * self.spans

    @property
    def item_rows(self) -> int:
        """Rows of a work item: few, so that a tree of eight rows and three kv heads still cuts evenly into threads."""
        return 2

    @property
    def key(self) -> str:
        name = self.format.name.replace("/", "_").replace("-", "")
        return f"{super().key}_{name}_p{self.page_size}_h{self.kv_heads}_d{self.head_dim}_b{self.page_bytes}"


@dataclass(frozen=True)
class AttendPlan(Paged):
    stem = "attend_plan"


@dataclass(frozen=True)
class Attend(Paged):
    """Attention of a few rows of a sequence over one span, per kv head; `scale2` is what a score becomes log2 of a probability by."""

    stem = "attend"
    heads: int = named("q", default=0)  # type: ignore[assignment]
    scale: float = named("", default=1.0)  # type: ignore[assignment]
    window: int = named("w", default=0)  # type: ignore[assignment]
    softcap: float = named("cap", default=0.0)  # type: ignore[assignment]
    sinks: int = named("s", default=0)  # type: ignore[assignment]
    coarse: bool = named("coarse", default=False)  # type: ignore[assignment]  # of nested formats the high plane alone

    @property
    def scale2(self) -> float:
        return log2(e) if self.softcap else self.scale * log2(e)  # soft-capped scores are scaled already

    @property
    def head_tile(self) -> int:
        """Query heads that share a pass over the keys: as many as keep the accumulators in registers."""
        group = self.heads // self.kv_heads
        most = max(1, 16 // -(-self.head_dim // 16))
        return max(t for t in range(1, most + 1) if group % t == 0)

    @property
    def reads_q(self) -> bool:
        """Whether keys want what `prepare_q` makes of a row's q; else they read it where it lies."""
        return self.keys in DOTS

    @property
    def weighs_blocks(self) -> bool:
        """Whether values add a block of 64 positions at once (integer dots), or token by token."""
        return self.values in DOTS

    @property
    def apart(self) -> bool:
        """Whether all of a span's probabilities are made before its values are read. Packed: 5 % faster; int8: a verify 6 % slower."""
        return isinstance(self.format.values, TokenValues)

    def key_subs(self, dot: str) -> int:
        """Groups of 16 tokens that share a pass over q: two accumulators (planes of q) for each of them and head."""
        room = REGISTERS.get(dot, FEW_REGISTERS) - (4 if self.key_parts > 1 else 0)  # codes unpacked from bytes take some
        return max(n for n in (1, 2, 4) if n == 1 or 2 * n * self.head_tile <= room)

    def value_vectors(self, dot: str) -> int:
        """Vectors of 16 channels that share a pass over the tokens: two accumulators (planes of p) for each of them and head."""
        return max(1, REGISTERS.get(dot, FEW_REGISTERS) // (2 * self.head_tile))


@dataclass(frozen=True)
class PrepareQ(Paged):
    """A row's queries as the integer dots of `Attend` want them."""

    stem = "prepare_q"
    heads: int = named("q", default=0)  # type: ignore[assignment]
    head_tile = 1  # heads that a pass of the template takes


@dataclass(frozen=True)
class AttendCombine(Paged):
    stem = "attend_combine"
    heads: int = named("q", default=0)  # type: ignore[assignment]
    scale: float = named("", default=1.0)  # type: ignore[assignment]
    quantise: bool = False

    @property
    def rotated(self) -> bool:
        """Whether the values were rotated in the cache, and so is their sum."""
        return self.format.values.rotated

    @property
    def scale2(self) -> float:
        return self.scale * log2(e)

    @property
    def n_padded(self) -> int:
        return padded(self.heads * self.head_dim, 64)


@dataclass(frozen=True)
class AppendKv(Paged):
    """`fused`: k and v are column ranges of a projection's rows, k before RoPE; else they are inputs of their own."""

    stem = "append_kv"
    fused: bool = False
    columns: int = named("n", default=0)  # type: ignore[assignment]
    k_start: int = named("k", default=0)  # type: ignore[assignment]
    v_start: int = named("v", default=0)  # type: ignore[assignment]
    half: int = named("half", default=0)  # type: ignore[assignment]

    @property
    def lanes(self) -> int:
        """LLVM 22 gives invalid code for a vector load over narrower vector stores: halves that are no whole vectors turn one by one."""
        return 1 if self.half % 16 else 16


@dataclass(frozen=True)
class Commit(Paged):
    """Of `count` layers that follow each other and have one format."""

    stem = "commit"
    count: int = named("l", default=0)  # type: ignore[assignment]


@dataclass(frozen=True)
class QuantiseKv(Paged):
    """Pages of a grouped format from their tokens' 16-bit forms: in a forward program, or, with `commits` layers, after a commit."""

    stem = "quantise_kv"
    commits: int = named("l", default=0)  # type: ignore[assignment]

    @property
    def by_channel(self) -> bool:
        return isinstance(self.format.keys, ChannelKeys)


@dataclass(frozen=True)
class SettleKv(Paged):
    stem = "settle_kv"


@dataclass(frozen=True)
class ReadKv(Paged):
    """Keys or values gathered by position, as stored (unfused attention)."""

    stem = "read_kv"
    which: str = named("", default="keys")  # type: ignore[assignment]
    ctx: int = 0

    @property
    def key(self) -> str:
        return f"{super().key}_{self.which}"
