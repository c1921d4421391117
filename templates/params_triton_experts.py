"""Parameters of the Triton templates that take pairs (row, slot) of a mixture of experts sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.templates.params_triton import power_of_two
from mlsdc.templates.params_triton_levels import ExpertLinear, ExpertLinearQ
from mlsdc.templates.params_triton_rows import RowParams


@dataclass(frozen=True)
class ExpertPlan(RowParams):
    """`expert_plan`: i32, where each expert's pairs begin and, one more, where the last one's end; then pairs row * slots + slot, sorted by
    expert, those of one expert in their own order."""

    template: ClassVar[str] = "expert_plan"

    experts: int
    slots: int

    @property
    def key(self) -> str:
        return self.named(f"e{self.experts}", f"s{self.slots}")

    @property
    def size(self) -> int:
        return self.experts + 1 + self.max_rows * self.slots

    @property
    def block(self) -> int:
        return min(1024, power_of_two(self.max_rows * self.slots))


@dataclass(frozen=True)
class ExpertRows(ExpertLinear):
    """`expert_rows`: expert_linear of `block_m` pairs of one expert, each with the sums and so the bits that it has alone."""

    template: ClassVar[str] = "expert_rows"

    block_m: int = 8
    most_programs: int = 0

    @property
    def experts_block(self) -> int:
        return power_of_two(self.experts)


@dataclass(frozen=True)
class ExpertTiles(ExpertLinear):
    """`expert_tiles`: expert_linear by dots of `block_m` pairs of one expert; for bf16 weights rows are sums of two bf16 numbers."""

    template: ClassVar[str] = "expert_tiles"

    block_m: int = 16
    block_n: int = 32
    most_programs: int = 0

    @property
    def key(self) -> str:
        return f"{super().key}_m{self.block_m}"

    @property
    def experts_block(self) -> int:
        return power_of_two(self.experts)


@dataclass(frozen=True)
class ExpertTilesQ(ExpertLinearQ):
    """`expert_tiles_q`: expert_linear_q of `block_m` pairs of one expert. Integer dots: the tile changes no bit."""

    template: ClassVar[str] = "expert_tiles_q"

    @property
    def key(self) -> str:
        return f"{super().key}_m{self.block_m}"

    @property
    def experts_block(self) -> int:
        return power_of_two(self.experts)
