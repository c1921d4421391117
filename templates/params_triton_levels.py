"""Parameters of the Triton templates that drafting levels and mixtures of experts add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.types import GROUP
from mlsdc.templates.params_triton import power_of_two
from mlsdc.templates.params_triton_rows import PART, LinearQ, RowParams


@dataclass(frozen=True)
class _Chosen(RowParams):
    """k of n columns."""

    n: int
    k: int

    @property
    def key(self) -> str:
        return self.named(f"n{self.n}", f"k{self.k}")


@dataclass(frozen=True)
class TopK(_Chosen):
    """`top_k_part` and `top_k_join`: the k largest of n columns, less the largest, their indices, and the sum of exp(x - largest)."""

    template: ClassVar[str] = "top_k_part"

    @property
    def part(self) -> int:
        return min(PART, power_of_two(max(self.n, self.k)))

    @property
    def parts(self) -> int:
        return -(-self.n // self.part)

    @property
    def parts_block(self) -> int:
        return power_of_two(self.parts)

    @property
    def candidates_block(self) -> int:
        return power_of_two(self.parts * self.k)


@dataclass(frozen=True)
class TopKJoin(TopK):
    template: ClassVar[str] = "top_k_join"


@dataclass(frozen=True)
class TopIndex(_Chosen):
    """`top_index`: indices of the k largest of n columns, largest first."""

    template: ClassVar[str] = "top_index"

    @property
    def block(self) -> int:
        return power_of_two(self.n)


@dataclass(frozen=True)
class Take(_Chosen):
    """`take`: k of n columns by index."""

    template: ClassVar[str] = "take"

    @property
    def block(self) -> int:
        return power_of_two(self.k)


@dataclass(frozen=True)
class Reduce(RowParams):
    """`reduce`: fn (mean, sum, max) over the axis of size n of [rows, outer, n, inner]."""

    template: ClassVar[str] = "reduce"

    fn: str
    outer: int
    n: int
    inner: int

    @property
    def key(self) -> str:
        return self.named(self.fn, f"o{self.outer}", f"n{self.n}", f"i{self.inner}")

    @property
    def n_block(self) -> int:
        return power_of_two(self.n)

    @property
    def inner_block(self) -> int:
        return power_of_two(self.inner)


@dataclass(frozen=True)
class Softmax(RowParams):
    """`softmax` of `heads` vectors of k a row."""

    template: ClassVar[str] = "softmax"

    heads: int
    k: int

    @property
    def key(self) -> str:
        return self.named(f"h{self.heads}", f"k{self.k}")

    @property
    def block(self) -> int:
        return power_of_two(self.k)


@dataclass(frozen=True)
class PadHeads(RowParams):
    """`pad_heads`: rows of `own` columns as rows of k, zeros behind."""

    template: ClassVar[str] = "pad_heads"

    own: int
    k: int

    @property
    def key(self) -> str:
        return self.named(f"n{self.own}", f"k{self.k}")

    @property
    def block(self) -> int:
        return power_of_two(self.k)


@dataclass(frozen=True)
class ExpertLinear(RowParams):
    """`expert_linear`: y[row, slot, n] = x[row, slot of `inputs`, k] @ w[expert, n, k]^T, w row-major, f32 or bf16."""

    template: ClassVar[str] = "expert_linear"

    experts: int
    slots: int
    n: int
    k: int
    dtype: str
    inputs: int = 1
    bias: bool = False
    block_n: int = 16
    block_k: int = 64

    @property
    def key(self) -> str:
        bias = "bias" if self.bias else ""
        return self.named(self.dtype, f"e{self.experts}", f"s{self.slots}", f"n{self.n}", f"k{self.k}", bias)

    @property
    def grid(self) -> int:
        return -(-self.n // self.block_n)


@dataclass(frozen=True)
class ExpertLinearQ(LinearQ):
    """`expert_linear_q`: the same by int8 dots; n counts the rows of all experts of the packed weight."""

    template: ClassVar[str] = "expert_linear_q"

    experts: int = 1
    slots: int = 1
    inputs: int = 1

    @property
    def key(self) -> str:
        extra = ("bias" if self.bias else "", f"fine{self.fine}" if self.fine else "", f"x{self.inputs}" if self.inputs > 1 else "")
        return self.named(f"w{self.bits}", f"e{self.experts}", f"s{self.slots}", f"n{self.columns_of_expert}", f"k{self.k}", *extra)

    @property
    def columns_of_expert(self) -> int:
        return self.n // self.experts

    @property
    def columns(self) -> int:
        return self.k * self.inputs + GROUP * self.fine

    @property
    def grid(self) -> int:
        return -(-self.columns_of_expert // self.block_n)
