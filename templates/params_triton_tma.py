"""Parameters of the Triton templates whose operands TMA brings: linears for many rows on Hopper.

`maps` is the ABI of the maps of the rows and of the weight, `shapes` what they are of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.types import GROUP
from mlsdc.templates.params_triton_rows import BLOCK_ROWS, Gated, GatedQ, Linear, LinearQ

Maps = tuple[str, str]
Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def plain_maps(params: Linear) -> Maps:
    """x f32[max_rows, k] and a weight of bf16 [n, k]."""
    return f"x_map: map f32[{params.block_m}, {params.block_k}]", f"w_map: map {params.dtype}[{params.block_n}, {params.block_k}]"


def packed_maps(params: LinearQ) -> Maps:
    """Codes i8[max_rows, columns], and a weight's by blocks of 16 rows: u8[blocks, groups, 16, 32]."""
    return f"x_map: map i8[{params.block_m}, {GROUP}]", f"w_map: map u8[{params.block_n // BLOCK_ROWS}, 1, {BLOCK_ROWS}, {GROUP}]"


def packed_shapes(params: LinearQ) -> Shapes:
    return (params.max_rows, params.columns), (params.n_padded // BLOCK_ROWS, params.groups, BLOCK_ROWS, GROUP)


@dataclass(frozen=True)
class LinearTma(Linear):
    """`linear_tma`: Linear with weights of bf16."""

    template: ClassVar[str] = "linear_tma"

    @property
    def maps(self) -> Maps:
        return plain_maps(self)

    @property
    def shapes(self) -> Shapes:
        return (self.max_rows, self.k), (self.n, self.k)


@dataclass(frozen=True)
class GatedTma(Gated):
    """`gated_tma`: Gated with weights of bf16."""

    template: ClassVar[str] = "gated_tma"

    @property
    def maps(self) -> Maps:
        return plain_maps(self)

    @property
    def shapes(self) -> Shapes:
        return (self.max_rows, self.k), (2 * self.n, self.k)


@dataclass(frozen=True)
class LinearQTma(LinearQ):
    """`linear_q_tma`: LinearQ with weights of 8 bits."""

    template: ClassVar[str] = "linear_q_tma"

    @property
    def maps(self) -> Maps:
        return packed_maps(self)

    @property
    def shapes(self) -> Shapes:
        return packed_shapes(self)


@dataclass(frozen=True)
class GatedQTma(GatedQ):
    """`gated_q_tma`: GatedQ with weights of 8 bits."""

    template: ClassVar[str] = "gated_q_tma"

    @property
    def maps(self) -> Maps:
        return packed_maps(self)

    @property
    def shapes(self) -> Shapes:
        return packed_shapes(self)
