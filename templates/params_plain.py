"""Parameters of the TIR templates of unfused ops: what a graph runs when fusion passes are left out.

A *value by position* is [rows, .., ctx, ..]: its ctx axis is laid out at the artifact's longest context, and only 0 .. the row's own
position is ever written or read. Scores and masks, whose last axis it is, pad it to whole vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from mlsdc.templates.params import Rows, TirParams, named, padded

LANES = 16


@dataclass(frozen=True)
class Operand:
    """An f32 buffer of `size` elements, read at `start` + index . strides; index is (row, i0, i1, ..), the last i runs over the vector."""

    size: int
    strides: tuple[int, ...]
    start: int = 0


@dataclass(frozen=True)
class Elementwise(TirParams):
    """y[rows, *dims] = fn(a), fn(a, value) or fn(a, b). A broadcast axis has stride 0; slices and transposes are a `copy` by strides."""

    fn: str
    rows_padded: int
    dims: tuple[int, ...]
    operands: tuple[Operand, ...]
    value: float | None = None

    @property
    def key(self) -> str:
        parts = [self.fn, f"m{self.rows_padded}", "n" + "x".join(map(str, self.dims))]
        if self.value is not None:
            parts.insert(1, f"by{self.value!r}".replace(".", "p").replace("-", "m").replace("+", ""))
        for name, operand in zip("ab", self.operands, strict=False):
            if operand != self.dense:
                parts.append(name + "x".join(map(str, (operand.start, *operand.strides))))
        return "_".join(parts)

    @property
    def dense(self) -> Operand:
        """The result, as an operand would be laid out."""
        n = prod(self.dims)
        return Operand(self.rows_padded * n, (n, *(prod(self.dims[i + 1 :]) for i in range(len(self.dims)))))

    @property
    def lanes(self) -> int:
        """As many as divide the last axis, so that there is no remainder; 1 where an operand is not read in order."""
        return gcd(self.dims[-1], LANES) if all(o.strides[-1] in (0, 1) for o in self.operands) else 1

    @property
    def outer(self) -> int:
        """Vectors' runs in a row: the axes before the last as one loop."""
        return prod(self.dims[:-1])

    @property
    def below(self) -> tuple[int, ...]:
        """For each of those axes, how many runs one step of it spans."""
        return tuple(prod(self.dims[i + 1 : -1]) for i in range(len(self.dims) - 1))

    def index(self, operand: Operand) -> str:
        """The element of the vector that starts at (r, i0, i1, .., c * lanes)."""
        names = ("r", *(f"i{i}" for i in range(len(self.dims) - 1)), "c")
        factors = (*operand.strides[:-1], operand.strides[-1] * self.lanes)
        terms = [name if factor == 1 else f"{name} * {factor}" for name, factor in zip(names, factors, strict=True) if factor]
        return " + ".join([*([str(operand.start)] if operand.start else []), *terms]) or "0"


@dataclass(frozen=True)
class RmsNorm(TirParams):
    """`heads` norms of k a row."""

    stem = "rms_norm"
    rows_padded: int = named("m")  # type: ignore[assignment]
    heads: int = named("h")  # type: ignore[assignment]
    k: int = 0
    eps: float = 0.0
    offset: float = 0.0

    @property
    def lanes(self) -> int:
        return gcd(self.k, LANES)


@dataclass(frozen=True)
class LinearF32(Rows):
    """y[rows, n] = x[rows, k] @ W[n, k]^T + bias, all f32; a task is a block of output columns."""

    stem = "linear_f32"
    n: int = 0
    k: int = 0
    bias: bool = False
    block: int = named("", default=8)  # type: ignore[assignment]

    @property
    def lanes(self) -> int:
        return gcd(self.k, LANES)


@dataclass(frozen=True)
class LinearBf16(Rows):
    """y[rows, n] = x[rows, k] @ W[n, k]^T + bias, x f32, W in 16-row blocks of bf16 (targets/cpu_layout.py), sums in f32."""

    stem = "linear_bf16"
    n: int = 0
    k: int = 0
    bias: bool = False

    @property
    def n_padded(self) -> int:
        return padded(self.n, 16)


@dataclass(frozen=True)
class LinearF8(LinearBf16):
    """The same with a scale a row: y[rows, n] = (x[rows, k] @ E[n, k]^T) * s[n] + bias, E in 16-row blocks of e4m3."""

    stem = "linear_f8"


@dataclass(frozen=True)
class RoundF8(TirParams):
    """y[rows, k] = the numbers that e4m3 and a scale a row leave of x, f32."""

    stem = "round_f8"
    rows_padded: int = named("m")  # type: ignore[assignment]
    k: int = 0


@dataclass(frozen=True)
class SumRanks(TirParams):
    """y[rows, n] = the sum of `ranks` parts [rows_padded, n], one behind the other."""

    stem = "sum_ranks"
    rows_padded: int = named("m")  # type: ignore[assignment]
    n: int = 0
    ranks: int = 2

    @property
    def lanes(self) -> int:
        return gcd(self.n, LANES)


@dataclass(frozen=True)
class EmbedBf16(TirParams):
    stem = "embed_bf16"
    rows_padded: int = named("m")  # type: ignore[assignment]
    n: int = 0
    k: int = 0
    scale: float = named("s", default=1.0)  # type: ignore[assignment]

    @property
    def n_padded(self) -> int:
        return padded(self.n, 16)


@dataclass(frozen=True)
class EmbedF32(TirParams):
    stem = "embed_f32"
    rows_padded: int = named("m")  # type: ignore[assignment]
    n: int = 0
    k: int = 0
    scale: float = named("s", default=1.0)  # type: ignore[assignment]

    @property
    def lanes(self) -> int:
        return gcd(self.k, LANES)


@dataclass(frozen=True)
class PadHeads(TirParams):
    """A row's n numbers, and zeros up to `padded`."""

    stem = "pad_heads"
    rows_padded: int = named("m")  # type: ignore[assignment]
    n: int = 0
    padded: int = named("to", default=0)  # type: ignore[assignment]


@dataclass(frozen=True)
class Softmax(TirParams):
    """Over n numbers, `heads` times a row; `by_position`: over the row's own position + 1 numbers of n."""

    stem = "softmax"
    rows_padded: int = named("m")  # type: ignore[assignment]
    heads: int = named("h")  # type: ignore[assignment]
    n: int = 0
    by_position: bool = named("ctx", default=False)  # type: ignore[assignment]

    @property
    def stride(self) -> int:
        return padded(self.n, LANES) if self.by_position else self.n

    @property
    def lanes(self) -> int:
        return LANES if self.by_position else gcd(self.n, LANES)


@dataclass(frozen=True)
class ByPosition(TirParams):
    """What kernels over values by position share. `ctx` is the longest context."""

    rows_padded: int = named("m")  # type: ignore[assignment]
    ctx: int = 0

    @property
    def stride(self) -> int:
        return padded(self.ctx, LANES)


@dataclass(frozen=True)
class TreeMask(ByPosition):
    stem = "tree_mask"
    window: int = named("w", default=0)  # type: ignore[assignment]
    sinks: int = named("s", default=0)  # type: ignore[assignment]


@dataclass(frozen=True)
class Mask(ByPosition):
    stem = "mask"
    heads: int = named("h", default=0)  # type: ignore[assignment]


@dataclass(frozen=True)
class Dequantise(ByPosition):
    stem = "dequantise_bf16"
    kv_heads: int = named("h", default=0)  # type: ignore[assignment]
    head_dim: int = named("d", default=0)  # type: ignore[assignment]


@dataclass(frozen=True)
class MatMulQK(ByPosition):
    stem = "matmul_qk"
    heads: int = named("q", default=0)  # type: ignore[assignment]
    kv_heads: int = named("h", default=0)  # type: ignore[assignment]
    head_dim: int = named("d", default=0)  # type: ignore[assignment]
    scale: float = named("s", default=1.0)  # type: ignore[assignment]
    softcap: float = named("cap", default=0.0)  # type: ignore[assignment]


@dataclass(frozen=True)
class MatMulPV(ByPosition):
    stem = "matmul_pv"
    heads: int = named("q", default=0)  # type: ignore[assignment]
    kv_heads: int = named("h", default=0)  # type: ignore[assignment]
    head_dim: int = named("d", default=0)  # type: ignore[assignment]

    @property
    def vectors(self) -> int:
        """Vectors of channels accumulated at once: at most 4, which stay in registers."""
        return gcd(self.head_dim // LANES, 4)
