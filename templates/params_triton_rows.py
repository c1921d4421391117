"""Parameters of the Triton templates that work row by row: linears, norms, embedding, elementwise ops, choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.types import GROUP
from mlsdc.templates.params_triton import digest, power_of_two

BLOCK_ROWS = 16  # output rows of a packed weight that lie side by side
PART = 4096  # columns of a row that one program looks at in argmax and sampling
MOST_SUPER = 8  # groups of 32 columns that one turn of a linear's loop multiplies


@dataclass(frozen=True)
class RowParams:
    """`count`: the header word that counts the rows, `max_rows` the most there can be: a8 values put their scales behind that many rows."""

    template: ClassVar[str]

    count: int
    max_rows: int

    def named(self, *parts: object) -> str:
        return "_".join(str(part) for part in (self.template, *parts) if part != "") + f"_{digest(self)}"


@dataclass(frozen=True)
class Packed(RowParams):
    """A weight [n, k] in the layout of targets/nvidia_layout.py: `bits` 8 or 4 a code, blocks of 16 rows, groups of 32 columns."""

    n: int
    k: int
    bits: int

    @property
    def n_padded(self) -> int:
        return -(-self.n // BLOCK_ROWS) * BLOCK_ROWS

    @property
    def groups(self) -> int:
        return self.k // GROUP

    @property
    def groups_padded(self) -> int:
        """q4 codes of two groups share bytes, so their number is even."""
        return self.groups if self.bits == 8 else -(-self.groups // 2) * 2

    @property
    def block_bytes(self) -> int:
        """Codes of 16 rows."""
        return BLOCK_ROWS * GROUP * self.groups_padded * self.bits // 8

    @property
    def scales_at(self) -> int:
        return self.n_padded // BLOCK_ROWS * self.block_bytes

    @property
    def mins_at(self) -> int:
        return self.scales_at + 2 * self.groups_padded * self.n_padded

    @property
    def groups_block(self) -> int:
        return power_of_two(self.groups)


@dataclass(frozen=True)
class LinearQ(Packed):
    """`linear_q`: y f32[rows, n] = h[rows, k] @ w^T (+ bias) (+ residual). A program takes `block_m` rows and `block_n` columns.

    `fine` groups of h have a second plane (a16). Integer dots are exact and groups are folded in order: the tile changes no bit.
    """

    template: ClassVar[str] = "linear_q"

    fine: int = 0
    bias: bool = False
    residual: bool = False
    block_m: int = 16
    block_n: int = 32
    most_programs: int = 0  # of a kernel for many rows, whose programs stay

    @property
    def key(self) -> str:
        extra = ("bias" if self.bias else "", "residual" if self.residual else "", f"fine{self.fine}" if self.fine else "")
        return self.named(f"w{self.bits}", f"n{self.n}", f"k{self.k}", *extra, f"m{self.block_m}")

    @property
    def columns(self) -> int:
        """Codes of a row of h: its own, then the second planes."""
        return self.k + GROUP * self.fine

    @property
    def units(self) -> int:
        """Turns' units along k: groups, or pairs of groups where two share bytes."""
        return self.groups if self.bits == 8 else self.groups_padded // 2

    @property
    def super(self) -> int:
        """Units of one turn of the loop: the largest divisor up to MOST_SUPER groups, of wide tiles up to half of it."""
        most = MOST_SUPER // (2 if self.most_programs else 1) // (2 if self.bits == 4 else 1)
        return max(size for size in range(1, most + 1) if self.units % size == 0)

    @property
    def grid(self) -> int:
        return -(-self.n // self.block_n)


@dataclass(frozen=True)
class LinearA16(LinearQ):
    """`linear_a16`: y f32[rows, n] = x f32[rows, k] @ w^T (+ bias), weights packed, rows not: they are the sum of two bf16 numbers."""

    template: ClassVar[str] = "linear_a16"


@dataclass(frozen=True)
class GatedQ(LinearQ):
    """`gated_q`: a8[rows, n] = quantise(act(gate) * up), (gate | up) = h @ w[2n, k]^T. `n` counts the result's columns."""

    template: ClassVar[str] = "gated_q"

    act: str = "silu"

    @property
    def key(self) -> str:
        fine = f"fine{self.fine}" if self.fine else ""
        return self.named(f"w{self.bits}", self.act, f"n{self.n}", f"k{self.k}", fine, f"m{self.block_m}")

    @property
    def n_padded(self) -> int:
        return 2 * self.n


@dataclass(frozen=True)
class GatedA16(LinearA16):
    """`gated_a16`: y f32[rows, n] = act(gate) * up, (gate | up) = x f32[rows, k] @ w[2n, k]^T. `n` counts the result's columns."""

    template: ClassVar[str] = "gated_a16"

    act: str = "silu"

    @property
    def key(self) -> str:
        return self.named(f"w{self.bits}", self.act, f"n{self.n}", f"k{self.k}", f"m{self.block_m}")

    @property
    def n_padded(self) -> int:
        return -(-2 * self.n // BLOCK_ROWS) * BLOCK_ROWS


@dataclass(frozen=True)
class EmbedQ(Packed):
    """`embed_q`: rows of a packed table, times `scale`."""

    template: ClassVar[str] = "embed_q"

    scale: float = 1.0

    @property
    def key(self) -> str:
        return self.named(f"w{self.bits}", f"n{self.n}", f"k{self.k}")


@dataclass(frozen=True)
class Embed(RowParams):
    """`embed`: rows of a table of f32 or bf16, times `scale`."""

    template: ClassVar[str] = "embed"

    n: int
    k: int
    scale: float = 1.0

    @property
    def key(self) -> str:
        return self.named(f"n{self.n}", f"k{self.k}")

    @property
    def block(self) -> int:
        return power_of_two(self.k)


@dataclass(frozen=True)
class Linear(RowParams):
    """`linear`: y f32[rows, n] = x f32[rows, k] @ w[n, k]^T (+ bias) (+ residual), w row-major f32, bf16, or u8: e4m3 and a scale a row.

    bf16 and u8: x is the sum of two bf16 numbers (16 bits of mantissa) if `terms` is 2, one (8 bits) if it is 1. f32: exact products.
    """

    template: ClassVar[str] = "linear"

    n: int
    k: int
    dtype: str
    bias: bool = False
    residual: bool = False
    terms: int = 2
    block_m: int = 16
    block_n: int = 32
    block_k: int = 64
    most_programs: int = 0  # of a kernel for many rows, whose programs stay

    @property
    def scales_at(self) -> int:
        """Where the f32 scales of e4m3 rows begin, in bytes."""
        return -(-self.n * self.k // 16) * 16

    @property
    def key(self) -> str:
        extra = ("bias" if self.bias else "", "residual" if self.residual else "")
        return self.named(self.dtype, f"n{self.n}", f"k{self.k}", *extra, f"m{self.block_m}")

    @property
    def grid(self) -> int:
        return -(-self.n // self.block_n)


@dataclass(frozen=True)
class Gated(Linear):
    """`gated`: y f32[rows, n] = act(gate) * up, (gate | up) = x f32[rows, k] @ w[2n, k]^T, w bf16 or u8: e4m3 and a scale a row."""

    template: ClassVar[str] = "gated"

    act: str = "silu"

    @property
    def scales_at(self) -> int:
        return -(-2 * self.n * self.k // 16) * 16

    @property
    def key(self) -> str:
        return self.named(self.dtype, self.act, f"n{self.n}", f"k{self.k}", f"m{self.block_m}")


@dataclass(frozen=True)
class RmsNorm(RowParams):
    """`rms_norm`: x / sqrt(mean(x^2) + eps) * (weight + offset) of `heads` vectors of k a row."""

    template: ClassVar[str] = "rms_norm"

    heads: int
    k: int
    eps: float
    offset: float = 0.0

    @property
    def key(self) -> str:
        return self.named(f"h{self.heads}", f"k{self.k}")

    @property
    def block(self) -> int:
        return power_of_two(self.k)


@dataclass(frozen=True)
class Quantise(RowParams):
    """`quantise`: (RMSNorm, then) a8 or, with `fine` second planes, a16 of x f32[rows, k]."""

    template: ClassVar[str] = "quantise"

    k: int
    norm: bool = False
    eps: float = 0.0
    offset: float = 0.0
    fine: int = 0

    @property
    def key(self) -> str:
        return self.named("norm" if self.norm else "", f"k{self.k}", f"fine{self.fine}" if self.fine else "")

    @property
    def groups(self) -> int:
        return self.k // GROUP

    @property
    def groups_block(self) -> int:
        return power_of_two(self.groups)

    @property
    def columns(self) -> int:
        return self.k + GROUP * self.fine


@dataclass(frozen=True)
class RopeTable(RowParams):
    """`rope_table`: cosine and sine of float32(position) * inv_freq, f32[rows, 2, half]."""

    template: ClassVar[str] = "rope_table"

    half: int
    scaling: float

    @property
    def key(self) -> str:
        return self.named(f"h{self.half}")

    @property
    def block(self) -> int:
        return power_of_two(self.half)


@dataclass(frozen=True)
class GatherRows(RowParams):
    """`gather_rows`: rows of x f32[rows, k] by index; `count` counts the index."""

    template: ClassVar[str] = "gather_rows"

    k: int

    @property
    def key(self) -> str:
        return self.named(f"k{self.k}")

    @property
    def block(self) -> int:
        return power_of_two(self.k)


@dataclass(frozen=True)
class ArgMax(RowParams):
    """`argmax_part` and `argmax_join`: the lowest id of the largest of the first `limit` of n columns."""

    template: ClassVar[str] = "argmax_part"

    n: int
    limit: int

    @property
    def key(self) -> str:
        return self.named(f"n{self.n}", f"of{self.limit}")

    @property
    def part(self) -> int:
        return PART

    @property
    def parts(self) -> int:
        return -(-self.limit // PART)

    @property
    def parts_block(self) -> int:
        return power_of_two(self.parts)


@dataclass(frozen=True)
class ArgMaxJoin(ArgMax):
    template: ClassVar[str] = "argmax_join"


@dataclass(frozen=True)
class Operand:
    """Strides of an elementwise operand, in elements: of the rows, then of `Elementwise.dims`; it starts at element `start`."""

    strides: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Elementwise(RowParams):
    """`elementwise`: y[rows, *dims] = fn(operands); `value` is the second operand of a function with a constant."""

    template: ClassVar[str] = "elementwise"

    fn: str
    dims: tuple[int, ...]
    operands: tuple[Operand, ...]
    value: float | None = None
    block: ClassVar[int] = 1024

    @property
    def key(self) -> str:
        return self.named(self.fn, f"n{self.columns}")

    @property
    def columns(self) -> int:
        size = 1
        for dim in self.dims:
            size *= dim
        return size

    @property
    def grid(self) -> int:
        return -(-self.columns // self.block)
