"""Linears for many rows whose operands TMA brings to shared memory: on Hopper, if asked for (`kernels: {linear: tma}`).

Never run on a card.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TypeAlias

from mlsdc.runtime.tensor_map import tiles_of
from mlsdc.targets.hardware import hopper_only
from mlsdc.targets.protocol import CallArg, MapRef, Target, ValueRef
from mlsdc.targets.triton_build import split_abi
from mlsdc.templates.params_triton_rows import Gated, GatedQ, Linear, LinearQ
from mlsdc.templates.params_triton_tma import GatedQTma, GatedTma, LinearQTma, LinearTma

SM = 90
Mappable: TypeAlias = LinearTma | LinearQTma | GatedTma | GatedQTma
KINDS: dict[type, type[Mappable]] = {Linear: LinearTma, LinearQ: LinearQTma, Gated: GatedTma, GatedQ: GatedQTma}


def refused(target: Target) -> str | None:
    """Why a target's linears cannot use TMA; None if they can."""
    if target.requires == (f"sm_{SM}",) and target.device == "cuda":
        return None
    return hopper_only(target.name, target.requires)


def by_tma(params: object, abi: tuple[str, ...], args: tuple[CallArg, ...]) -> tuple[Mappable, tuple[str, ...], tuple[CallArg, ...]] | None:
    """The same linear with tensor maps of rows and weight before its arguments; None where it has no such template: other weights than bf16
    and 8 bits, and rows that are no multiple of 16 bytes."""
    kind = KINDS.get(type(params))
    if kind is None or getattr(params, "dtype", "bf16") != "bf16" or getattr(params, "bits", 8) != 8 or getattr(params, "terms", 2) != 2:
        return None
    made = kind(**{field.name: getattr(params, field.name) for field in fields(params)})  # type: ignore[arg-type]
    places = [[name for name, _ in split_abi(abi)].index(name) for name in ("x_ptr", "w_ptr")]
    maps = []
    for place, shape, (_, type_) in zip(places, made.shapes, split_abi(made.maps), strict=True):
        tiles, of = tiles_of(type_), args[place]
        if tiles is None or tiles.unfit(shape) or not isinstance(of, ValueRef):
            return None
        maps.append(MapRef(of, shape))
    return made, (*made.maps, *abi), (*maps, *args)
