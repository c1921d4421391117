"""Which other builds of a kernel are shipped beside the one that is launched by default, for `mlsdc tune` to choose among on a card.

None changes a bit of a result (law L2). Integer dots are exact, and their groups are folded in order: they take any tile. Float dots keep
the rows of a tile and the order of k; a column's chain of multiply-adds is the same however many columns a tile has. Attention sums over
columns, in an order that depends on the warps: only the depth of its pipeline varies. `mlsdc tune` looks what a card makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlsdc.targets.hardware import Gpu
from mlsdc.targets.protocol import KernelSpec
from mlsdc.targets.triton_build import Variant
from mlsdc.templates.params_triton_f8 import GatedF8, LinearF8
from mlsdc.templates.params_triton_rows import Gated, GatedA16, GatedQ, Linear, LinearA16, LinearQ

FEW_ROWS = 16  # of a tile for decoding; a tile for prompts has more
TALL, NARROW, BROAD = 32, 16, 64  # rows; columns
LINEARS = (Linear, Gated, LinearF8, GatedF8, LinearA16, GatedA16, LinearQ, GatedQ)
ATTENTION_STAGES = (7, 3)
DEEPER = 2  # stages more than the default's


@dataclass(frozen=True)
class Alternative:
    """Another build of a kernel: its text's parameters and how they are compiled. `grid` and `grain` as in KernelVariant."""

    spec: KernelSpec
    how: Variant
    grid: int = 0
    grain: int = 0

    @property
    def name(self) -> str:
        """`m16n64w4s3`: rows and columns of a tile where they are not the default's, warps, stages."""
        tile = f"m{self.spec.params.block_m}n{self.spec.params.block_n}" if self.grid else ""  # type: ignore[attr-defined]
        return f"{tile}w{self.how.num_warps}s{self.how.num_stages}"


def alternatives(spec: KernelSpec, gpu: Gpu, default: Variant) -> tuple[Alternative, ...]:
    """Of a kernel whose default was built as `default`; those that do not fit the GPU are left out by the build."""
    params = spec.params
    if type(params) in LINEARS:
        return linear(spec, params, gpu, default)  # type: ignore[arg-type]
    if spec.template == "attend_split":
        depths = (Variant(default.num_warps, stages) for stages in ATTENTION_STAGES)
        return tuple(Alternative(spec, how) for how in depths if how != default)
    return ()


def linear(spec: KernelSpec, params: Linear | LinearQ, gpu: Gpu, default: Variant) -> tuple[Alternative, ...]:
    """Tiles for decoding: narrower ones where there are fewer tiles than two for each multiprocessor, else broader ones; a deeper pipeline;
    taller ones for 17 rows and more. Tiles for prompts: half the columns."""
    quantises, integer = isinstance(params, GatedQ), isinstance(params, LinearQ) and not isinstance(params, LinearA16)
    if params.block_m > FEW_ROWS:
        half = params.block_n // 2
        return (tiled(spec, params.block_m, half, Variant(4, 3)),) if half >= 32 else ()
    found = [Alternative(spec, Variant(default.num_warps, default.num_stages + DEEPER))]
    if params.grid >= 2 * gpu.multiprocessors:
        if not quantises or params.n % BROAD == 0:
            found.append(tiled(spec, params.block_m, BROAD, Variant(8, 3) if quantises else Variant(4, 4)))
    elif not quantises:  # in groups of 32 columns
        found.append(tiled(spec, params.block_m, NARROW, Variant(4, 4)))
    if integer and params.max_rows > FEW_ROWS:
        found.append(tiled(spec, TALL, params.block_n, Variant(4, 3)))
    return tuple(found)


def tiled(spec: KernelSpec, rows: int, columns: int, how: Variant) -> Alternative:
    params = replace(spec.params, block_m=rows, block_n=columns)  # type: ignore[type-var]
    return Alternative(replace(spec, params=params), how, params.grid, rows)  # type: ignore[attr-defined]
