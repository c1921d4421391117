"""Parameters of the TIR templates of mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from mlsdc.templates.params import Packed, Rows, TirParams, named, total_columns

LANES = 16


@dataclass(frozen=True)
class TopIndex(TirParams):
    """Indices of the k largest of n, a row a task."""

    stem = "top_index"
    rows_padded: int = named("m")  # type: ignore[assignment]
    n: int = 0
    k: int = 0


@dataclass(frozen=True)
class Take(TirParams):
    """k of n numbers by index, a row a task."""

    stem = "take"
    rows_padded: int = named("m")  # type: ignore[assignment]
    n: int = 0
    k: int = 0


@dataclass(frozen=True)
class Reduce(TirParams):
    """fn over the axis of size n of [rows, outer, n, inner]; a task is a row."""

    fn: str = named("")  # type: ignore[assignment]
    rows_padded: int = named("m")  # type: ignore[assignment]
    outer: int = named("o")  # type: ignore[assignment]
    n: int = named("n")  # type: ignore[assignment]
    inner: int = named("i")  # type: ignore[assignment]
    stem = "reduce"

    @property
    def across(self) -> bool:
        """The axis is the last one and of whole vectors: lanes are summed one by one, then among themselves."""
        return self.inner == 1 and self.n % LANES == 0

    @property
    def lanes(self) -> int:
        return LANES if self.across else gcd(self.inner, LANES)


@dataclass(frozen=True)
class Experts(Rows):
    """What kernels over (row, slot) pairs sorted by expert share.

    The plan, i32: [0] how many experts are hit; at `hit`, each one's number; at `start`, where its pairs begin in `order` (and, one more,
    where the last one's end); at `cursor`, what sorting needs; at `order`, pairs row * slots + slot.
    """

    experts: int = named("e", default=0)  # type: ignore[assignment]
    slots: int = named("s", default=0)  # type: ignore[assignment]

    @property
    def hit(self) -> int:
        return 1

    @property
    def start(self) -> int:
        return 1 + self.experts

    @property
    def cursor(self) -> int:
        return self.start + self.experts + 1

    @property
    def order(self) -> int:
        return self.cursor + self.experts

    @property
    def pairs(self) -> int:
        return self.rows_padded * self.slots

    @property
    def plan_size(self) -> int:
        return self.order + self.pairs


@dataclass(frozen=True)
class ExpertPlan(Experts):
    stem = "expert_plan"


@dataclass(frozen=True)
class ExpertLinearF32(Experts):
    """y[row, slot, n] = x[row, slot of `inputs`, k] @ W[expert, n, k]^T; a task is (expert hit, block of columns)."""

    stem = "expert_linear_f32"
    n: int = 0
    k: int = 0
    inputs: int = named("x", default=1)  # type: ignore[assignment]
    bias: bool = False
    block: int = named("", default=8)  # type: ignore[assignment]

    @property
    def lanes(self) -> int:
        return gcd(self.k, LANES)

    @property
    def blocks(self) -> int:
        return -(-self.n // self.block)


@dataclass(frozen=True)
class ExpertLinearQ(Packed, Experts):
    """The same by int8 dots; W in 16-row blocks (targets/cpu_layout.py), no block with rows of two experts."""

    weights: str = named("", default="q8")  # type: ignore[assignment]
    n: int = 0
    k: int = 0
    inputs: int = named("x", default=1)  # type: ignore[assignment]
    isa: str = named("", default="vnni512")  # type: ignore[assignment]
    bias: bool = False
    fine: int = 0

    @property
    def stem(self) -> str:  # type: ignore[override]
        return f"expert_linear_{self.weights}"

    @property
    def k_total(self) -> int:
        return total_columns(self.k * self.inputs, self.fine)

    @property
    def blocks(self) -> int:
        return self.n // 16
