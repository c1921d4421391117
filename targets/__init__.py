"""Targets by name. The table holds strings: naming a target imports neither TVM nor Triton; they are imported when one builds."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlsdc.compiler.errors import CompileError
from mlsdc.runtime.device.cpu_features import cpu_features, machine_name
from mlsdc.runtime.step import Limits
from mlsdc.targets.cpu_isa import ISAS
from mlsdc.targets.hardware import AMD_GPUS, GPUS

if TYPE_CHECKING:
    from mlsdc.targets.protocol import Target

__all__ = ["ALIASES", "NATIVE", "TARGETS", "TargetEntry", "make_target", "native_target", "target_names"]

NATIVE = "cpu-native"
ALIASES = {"cpu": NATIVE}


@dataclass(frozen=True)
class TargetEntry:
    """`where` is `module:factory`, called as factory(name, limits), and as factory(name, limits, exact) where there is a mode that gives up
    law L2 for speed (`fast`). `artifact`: whole programs compile for it, not only some kernels."""

    where: str
    extra: str
    summary: str
    artifact: bool = True
    fast: bool = False


TARGETS: dict[str, TargetEntry] = {
    NATIVE: TargetEntry("mlsdc.targets.cpu:cpu_target", "compile", "the best of the CPU targets that this machine runs"),
    **{name: TargetEntry("mlsdc.targets.cpu:cpu_target", "compile", isa.summary) for name, isa in ISAS.items()},
    **{name: TargetEntry("mlsdc.targets.nvidia:NvidiaTarget", "nvidia", gpu.summary, fast=True) for name, gpu in GPUS.items()},
    **{name: TargetEntry("mlsdc.targets.amd:AmdTarget", "nvidia", gpu.summary, fast=True) for name, gpu in AMD_GPUS.items()},
}


def make_target(name: str, limits: Limits, exact: bool = True) -> Target:
    """The target called `name`, for programs of these limits; one without a fast mode (CPUs) is `exact` whatever is asked for. Raises
    CompileError if `cpu-native` fits nothing, KeyError for no name."""
    module, _, factory = TARGETS[name].where.partition(":")
    more = (exact,) if TARGETS[name].fast else ()
    target: Target = getattr(importlib.import_module(module), factory)(native_target() if name == NATIVE else name, limits, *more)
    return target


def target_names(hardware: str) -> tuple[str, ...]:
    """The targets that `hardware`, `a,b`, names: each once, the best first. Raises CompileError if `cpu-native` fits nothing."""
    names = {native_target() if ALIASES.get(name, name) == NATIVE else name for name in hardware.split(",")}
    return tuple(name for name in TARGETS if name in names)


def native_target() -> str:
    """The first CPU target, best first, that this machine can run. Raises CompileError."""
    features = cpu_features()
    for name, isa in ISAS.items():
        if features.issuperset(isa.requires):
            return name
    raise CompileError(f"{NATIVE}: this machine has {machine_name(features)}, CPU targets are {', '.join(ISAS)}: name one with --target")
