"""Parameters of the Triton templates that multiply e4m3 rows by e4m3 weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.templates.params_triton import power_of_two
from mlsdc.templates.params_triton_rows import Gated, Linear, RowParams

MOST_BLOCK = 4096  # columns of a row that are held at a time
MOST_IMPRECISE = 128  # columns whose products a tensor core adds by itself, before f32 takes the sum


def step(k: int) -> int:
    """Columns of one turn of a linear's loop: as many as sum up in a tensor core, unless half of them fit the row better."""
    return MOST_IMPRECISE if k % MOST_IMPRECISE == 0 else MOST_IMPRECISE // 2


@dataclass(frozen=True)
class QuantiseF8(RowParams):
    """`quantise_f8`: x f32[rows, k] -> codes u8[rows, k], the bits of e4m3, and scales f32[rows] = max|x| / 448."""

    template: ClassVar[str] = "quantise_f8"

    k: int

    @property
    def key(self) -> str:
        return self.named(f"k{self.k}")

    @property
    def block(self) -> int:
        return min(power_of_two(self.k), MOST_BLOCK)


@dataclass(frozen=True)
class LinearF8(Linear):
    """`linear_f8`: Linear with weights of e4m3 and rows of e4m3 with a scale each; every `block_k` columns their sum goes into f32."""

    template: ClassVar[str] = "linear_f8"


@dataclass(frozen=True)
class GatedF8(Gated):
    """`gated_f8`: Gated likewise."""

    template: ClassVar[str] = "gated_f8"
