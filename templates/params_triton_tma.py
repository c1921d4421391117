"""Parameters of the Triton templates whose operands TMA brings: linears for many rows on Hopper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.types import GROUP
from mlsdc.templates.params_triton_rows import BLOCK_ROWS, Linear, LinearQ


@dataclass(frozen=True)
class LinearTma(Linear):
    """`linear_tma`: Linear with weights of bf16."""

    template: ClassVar[str] = "linear_tma"

    @property
    def maps(self) -> tuple[str, str]:
        """ABI of the maps of x [max_rows, k] and of the weight [n, k]."""
        return (f"x_map: map f32[{self.block_m}, {self.block_k}]", f"w_map: map {self.dtype}[{self.block_n}, {self.block_k}]")

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.max_rows, self.k), (self.n, self.k)


@dataclass(frozen=True)
class LinearQTma(LinearQ):
    """`linear_q_tma`: LinearQ with weights of 8 bits."""

    template: ClassVar[str] = "linear_q_tma"

    @property
    def maps(self) -> tuple[str, str]:
        """ABI of the maps of h's codes [max_rows, columns] and of the weight's [blocks of 16 rows, groups, 16, 32]."""
        return (f"x_map: map i8[{self.block_m}, {GROUP}]", f"w_map: map u8[{self.block_n // BLOCK_ROWS}, 1, {BLOCK_ROWS}, {GROUP}]")

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.max_rows, self.columns), (self.n_padded // BLOCK_ROWS, self.groups, BLOCK_ROWS, GROUP)
