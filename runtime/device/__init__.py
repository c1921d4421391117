"""Kinds of devices; a kind's module is imported when an artifact's target asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from mlsdc.runtime.device.base import Device
from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.manifest import TargetInfo

if TYPE_CHECKING:
    from mlsdc.runtime.artifact import Artifact  # which needs device.cpu_features to be imported itself

KINDS: Mapping[str, str] = {
    "cpu": "mlsdc.runtime.device.cpu:CpuDevice",
    "cuda": "mlsdc.runtime.device.cuda:CudaDevice",
    "interpret": "mlsdc.targets.interpret:InterpretDevice",  # of the compiler's install, for tests: GPU kernels on a CPU
}

SHARDED: Mapping[str, str] = {"cpu": "mlsdc.runtime.device.cpu_ranks:LeadDevice"}  # of an artifact for several ranks


def open_device(artifact: Artifact, target: TargetInfo, *, threads: int | None = None) -> Device:
    """The device a target is for: `KIND(artifact, target, threads=...)`; `target.device` may say which of several, `cuda:1`.

    Raises DeviceError.
    """
    kind = target.device.partition(":")[0]
    if kind not in KINDS:
        raise DeviceError(f"target '{target.name}': this runtime has no '{target.device}' device; it has {', '.join(KINDS)}")
    size = artifact.manifest.world_size
    if size > 1 and kind not in SHARDED:
        raise DeviceError(f"the artifact is split over {size} ranks; device '{kind}' runs one: {', '.join(SHARDED)} run several")
    module, name = (SHARDED if size > 1 else KINDS)[kind].split(":")
    device: Device = getattr(import_module(module), name)(artifact, target, threads=threads)
    return device
