"""Targets by name. The table holds strings: naming a target imports neither TVM nor Triton; making one does when it builds."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlsdc.runtime.step import Limits

if TYPE_CHECKING:
    from mlsdc.targets.protocol import Target

__all__ = ["TARGETS", "TargetEntry", "make_target"]


@dataclass(frozen=True)
class TargetEntry:
    """`where` is `module:Class`, called as Class(name, limits). `artifact`: a whole program can be compiled for it, not only some kernels."""

    where: str
    extra: str
    summary: str
    artifact: bool = True


TARGETS: dict[str, TargetEntry] = {
    "cpu-native": TargetEntry("mlsdc.targets.cpu:CpuTarget", "compile", "the CPU that compiles (AVX-512 VNNI today)"),
    "h100": TargetEntry("mlsdc.targets.nvidia:NvidiaTarget", "nvidia", "NVIDIA sm_90, Triton: paged attention only so far", artifact=False),
    "a100": TargetEntry("mlsdc.targets.nvidia:NvidiaTarget", "nvidia", "NVIDIA sm_80, Triton: paged attention only so far", artifact=False),
}


def make_target(name: str, limits: Limits) -> Target:
    """The target called `name`, for programs of these limits. Raises KeyError for a name that is not in TARGETS."""
    module, _, attribute = TARGETS[name].where.partition(":")
    target: Target = getattr(importlib.import_module(module), attribute)(name, limits)
    return target
