"""Linears for many rows whose operands TMA brings to shared memory: from Hopper on, if asked for (`kernels: {linear: tma}`).

Never run on a card.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TypeAlias

from mlsdc.runtime.tensor_map import tiles_of
from mlsdc.targets.hardware import TMA, Gpu, only
from mlsdc.targets.protocol import CallArg, MapRef, Target, ValueRef
from mlsdc.targets.triton_build import split_abi
from mlsdc.templates.params_triton_rows import Gated, GatedQ, Linear, LinearQ
from mlsdc.templates.params_triton_tma import GatedQTma, GatedTma, LinearQTma, LinearTma

Mappable: TypeAlias = LinearTma | LinearQTma | GatedTma | GatedQTma
KINDS: dict[type, type[Mappable]] = {Linear: LinearTma, LinearQ: LinearQTma, Gated: GatedTma, GatedQ: GatedQTma}


def refused(target: Target) -> str | None:
    """Why a target's linears cannot use TMA; None if they can."""
    if target.device == "cuda" and target.requires in [(f"sm_{sm}",) for sm in TMA]:
        return None
    return only(target.name, target.requires, *TMA)


def columns(params: Linear | LinearQ, gpu: Gpu) -> int:
    """Of a tile, so that none spills: of a gated linear, which has two sums a column, half as many, in whole tiles where it quantises."""
    if isinstance(params, GatedQ):
        return 64 if params.n % 64 == 0 else 32
    return 64 if isinstance(params, Gated) or (gpu.sm == 120 and not isinstance(params, LinearQ)) else 128


def by_tma(params: Linear | LinearQ, gpu: Gpu, abi: tuple[str, ...], args: tuple[CallArg, ...]
           ) -> tuple[Mappable, tuple[str, ...], tuple[CallArg, ...]] | None:
    """The same linear with tensor maps of rows and weight before its arguments; None where it has no such template: other weights than bf16
    and 8 bits, and rows that are no multiple of 16 bytes."""
    kind = KINDS.get(type(params))
    if kind is None or getattr(params, "dtype", "bf16") != "bf16" or getattr(params, "bits", 8) != 8 or getattr(params, "terms", 2) != 2:
        return None
    same = {field.name: getattr(params, field.name) for field in fields(params)}
    made = kind(**same | {"block_n": columns(params, gpu)})
    places = [[name for name, _ in split_abi(abi)].index(name) for name in ("x_ptr", "w_ptr")]
    maps = []
    for place, shape, (_, type_) in zip(places, made.shapes, split_abi(made.maps), strict=True):
        tiles, of = tiles_of(type_), args[place]
        if tiles is None or tiles.unfit(shape) or not isinstance(of, ValueRef):
            return None
        maps.append(MapRef(of, shape))
    return made, (*made.maps, *abi), (*maps, *args)
