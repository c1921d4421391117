"""Parameters of the TIR templates: one frozen dataclass a template, holding everything the template may ask for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import gcd

from mlsdc.runtime.bench import STREAM_BLOCK
from mlsdc.runtime.step import Header


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


class Packed:
    """What kernels that multiply packed weights by a8 or a16 rows ask of their weights' format and columns."""

    weights: str
    k: int
    fine: int

    @property
    def pair_bytes(self) -> int:
        return PAIR_BYTES[self.weights]

    @property
    def k_padded(self) -> int:
        return padded(self.k, 64)

    @property
    def k_total(self) -> int:
        """Columns that a row of the activations takes in memory."""
        return total_columns(self.k, self.fine)


@dataclass(frozen=True)
class LinearQ(Packed, Rows):
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
    def n_padded(self) -> int:
        return padded(self.n, 16)


@dataclass(frozen=True)
class GatedQ(Packed, Rows):
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


ROWS, OUT = int(Header.ROWS), int(Header.OUT)
