"""Parameters of the TIR templates: one frozen dataclass a template, holding everything the template may ask for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import e, gcd, log2

from mlsdc.runtime.bench import STREAM_BLOCK
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.step import Header, Limits


def padded(n: int, to: int) -> int:
    return -(-n // to) * to


def total_columns(k: int, fine: int) -> int:
    """Columns that a row of a8 or a16 takes in memory: k and the second planes, each rounded up to 64."""
    return padded(k, 64) + padded(32 * fine, 64)


PAIR_BYTES = {"q8": 1088, "q4": 640}  # a pair of groups of 16 rows, by weight format (targets/cpu_layout.py)


class TirParams:
    """Base: a key from the fields that differ between kernels of one program, so that names stay readable and unique."""

    stem: str

    @property
    def key(self) -> str:
        parts = [self.stem]
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            short = field.metadata.get("key", field.name)
            if value is True:
                parts.append(short)
            elif value not in (False, None, "") and short:
                parts.append(f"{short}{value}".replace(".", "p").replace("-", "m"))
        return "_".join(parts)


def named(short: str, **kwargs: object) -> object:
    """A field that appears in the key as `short` + value; an empty `short` keeps it out."""
    return dataclasses.field(metadata={"key": short}, **kwargs)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Rows(TirParams):
    """Which header word counts the rows, and the most there can be (padded to tiles of 8)."""

    count: int = named("c")  # type: ignore[assignment]
    rows_padded: int = named("m")  # type: ignore[assignment]


@dataclass(frozen=True)
class LinearQ(Rows):
    """y[rows, n] = h[rows, k] @ W[n, k]^T, W in 16-row blocks of `weights` (targets/cpu_layout.py). `fine` groups have a second plane
    (a16)."""

    weights: str = named("", default="q8")  # type: ignore[assignment]
    n: int = 0
    k: int = 0
    isa: str = named("", default="vnni512")  # type: ignore[assignment]
    bias: bool = False
    residual: bool = False
    fine: int = 0

    @property
    def stem(self) -> str:  # type: ignore[override]
        return f"linear_{self.weights}"

    @property
    def pair_bytes(self) -> int:
        return PAIR_BYTES[self.weights]

    @property
    def k_padded(self) -> int:
        return padded(self.k, 64)

    @property
    def k_total(self) -> int:
        return total_columns(self.k, self.fine)

    @property
    def n_padded(self) -> int:
        return padded(self.n, 16)


@dataclass(frozen=True)
class GatedQ(Rows):
    """a8[rows, n] = quantise(act(gate) * up), (gate | up) = h @ W[2n, k]^T."""

    weights: str = named("", default="q8")  # type: ignore[assignment]
    n: int = 0
    k: int = 0
    act: str = named("", default="silu")  # type: ignore[assignment]
    isa: str = named("", default="vnni512")  # type: ignore[assignment]
    fine: int = 0

    @property
    def stem(self) -> str:  # type: ignore[override]
        return f"gated_{self.weights}"

    @property
    def pair_bytes(self) -> int:
        return PAIR_BYTES[self.weights]

    @property
    def k_padded(self) -> int:
        return padded(self.k, 64)

    @property
    def k_total(self) -> int:
        return total_columns(self.k, self.fine)

    @property
    def n_padded(self) -> int:
        return padded(self.n, 64)

    @property
    def key(self) -> str:
        return super().key + ("" if self.act == "silu" else "_" + self.act)


@dataclass(frozen=True)
class NormQuantise(Rows):
    """a8[rows, k] = quantise(rms_norm(x)) or, without `norm`, quantise(x). `fine` groups get a second plane (a16)."""

    stem = "quantise"
    k: int = 0
    norm: bool = False
    eps: float = named("", default=0.0)  # type: ignore[assignment]
    offset: float = named("", default=0.0)  # type: ignore[assignment]
    fine: int = 0

    @property
    def k_padded(self) -> int:
        return padded(self.k, 64)

    @property
    def k_total(self) -> int:
        return total_columns(self.k, self.fine)

    @property
    def key(self) -> str:
        numbers = f"_eps{self.eps:g}" + (f"_offset{self.offset:g}" if self.offset else "")
        return super().key + (numbers.replace(".", "p").replace("-", "m") if self.norm else "")


@dataclass(frozen=True)
class EmbedQ8(TirParams):
    """f32[rows, k] rows of a q8 table of n tokens, times `scale`."""

    stem = "embed_q8"
    rows_padded: int = named("m")  # type: ignore[assignment]
    n: int = 0
    k: int = 0
    scale: float = named("s", default=1.0)  # type: ignore[assignment]

    @property
    def k_padded(self) -> int:
        return padded(self.k, 64)

    @property
    def n_padded(self) -> int:
        return padded(self.n, 16)


@dataclass(frozen=True)
class RopeTable(TirParams):
    stem = "rope_table"
    rows_padded: int = named("m")  # type: ignore[assignment]
    half: int = 0
    scaling: float = named("s", default=1.0)  # type: ignore[assignment]


@dataclass(frozen=True)
class Rope(TirParams):
    """Heads that start at column `start` of rows of `columns` f32."""

    stem = "rope"
    rows_padded: int = named("m")  # type: ignore[assignment]
    columns: int = named("n")  # type: ignore[assignment]
    start: int = named("at")  # type: ignore[assignment]
    heads: int = named("h")  # type: ignore[assignment]
    head_dim: int = named("d")  # type: ignore[assignment]
    half: int = named("half")  # type: ignore[assignment]

    @property
    def lanes(self) -> int:
        return gcd(self.half, 16)


@dataclass(frozen=True)
class GatherRows(TirParams):
    stem = "gather_rows"
    rows_padded: int = named("m")  # type: ignore[assignment]
    out_padded: int = named("o")  # type: ignore[assignment]
    k: int = 0


@dataclass(frozen=True)
class StreamRead(TirParams):
    """Every byte of a buffer, in blocks of `block` bytes."""

    stem = "stream_read"
    block: int = named("", default=STREAM_BLOCK)  # type: ignore[assignment]


@dataclass(frozen=True)
class ArgMax(TirParams):
    """Largest of the first `limit` of n logits a row, in `parts` parts; `stem` says which of the two steps."""

    rows_padded: int = named("m")  # type: ignore[assignment]
    n: int = 0
    limit: int = 0
    parts: int = 16
    join: bool = named("", default=False)  # type: ignore[assignment]

    @property
    def stem(self) -> str:  # type: ignore[override]
        return "argmax_join" if self.join else "argmax_part"

    @property
    def part_size(self) -> int:
        return padded(-(-self.limit // self.parts), 16)


SPAN = 256  # positions of one attention work item: a multiple of the block of 64 (law L2: spans and blocks are by position)


@dataclass(frozen=True)
class Paged(TirParams):
    """What every kernel over pages knows: the geometry of a page and the limits of a step."""

    geometry: KvGeometry = named("")  # type: ignore[assignment]
    limits: Limits = named("")  # type: ignore[assignment]

    @property
    def format(self) -> str:
        return self.geometry.format

    @property
    def page_size(self) -> int:
        return self.geometry.page_size

    @property
    def page_bytes(self) -> int:
        return self.geometry.page_bytes

    @property
    def head_bytes(self) -> int:
        return self.geometry.head_bytes

    @property
    def k_block_bytes(self) -> int:
        return self.geometry.k_block_bytes

    @property
    def kv_heads(self) -> int:
        return self.geometry.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.geometry.head_dim

    @property
    def layers(self) -> int:
        return self.geometry.num_layers

    @property
    def rows_padded(self) -> int:
        return padded(self.limits.max_num_batched_tokens, 8)

    @property
    def seqs(self) -> int:
        return self.limits.max_num_seqs

    @property
    def pages_per_seq(self) -> int:
        return self.limits.pages_per_seq(self.page_size)

    @property
    def scratch_pages(self) -> int:
        return self.limits.scratch_pages(self.page_size)

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
        return f"{super().key}_{self.format}_p{self.page_size}_h{self.kv_heads}_d{self.head_dim}"


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

    @property
    def scale2(self) -> float:
        return log2(e) if self.softcap else self.scale * log2(e)  # soft-capped scores are scaled already

    @property
    def head_tile(self) -> int:
        """Query heads that share a pass over the keys: as many as keep the accumulators in registers."""
        group = self.heads // self.kv_heads
        most = max(1, 16 // -(-self.head_dim // 16))
        return max(t for t in range(1, most + 1) if group % t == 0)


@dataclass(frozen=True)
class AttendCombine(Paged):
    stem = "attend_combine"
    heads: int = named("q", default=0)  # type: ignore[assignment]
    scale: float = named("", default=1.0)  # type: ignore[assignment]
    quantise: bool = False

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
        return gcd(self.half, 16) if self.half else 16


@dataclass(frozen=True)
class Commit(Paged):
    stem = "commit"


ROWS, OUT = int(Header.ROWS), int(Header.OUT)
