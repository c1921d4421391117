"""GPUs that kernels are generated for: what the compiler must know and their code must fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Gpu:
    """`sm` as in sm_90. `shared_bytes` is the most a block may ask for; `registers` and `max_threads` are of one multiprocessor, of
    which there are `multiprocessors` (of an H100 those of the SXM module)."""

    name: str
    sm: int
    shared_bytes: int
    multiprocessors: int = 0
    registers: int = 65536

    @property
    def max_threads(self) -> int:
        return 2048 if self.sm in (80, 90, 100) else 1536

    @property
    def summary(self) -> str:
        what = "a model's kernels compiled here" if self.sm == 120 else "compiled and interpreted here"
        return f"NVIDIA sm_{self.sm}, Triton: {what}, never run on a card"


GPUS = {gpu.name: gpu for gpu in (
    Gpu("b200", sm=100, multiprocessors=148, shared_bytes=227 * KIB),
    Gpu("h200", sm=90, multiprocessors=132, shared_bytes=227 * KIB),
    Gpu("h100", sm=90, multiprocessors=132, shared_bytes=227 * KIB),
    Gpu("rtx5090", sm=120, multiprocessors=170, shared_bytes=99 * KIB),
    Gpu("l40s", sm=89, multiprocessors=142, shared_bytes=99 * KIB),
    Gpu("rtx4090", sm=89, multiprocessors=128, shared_bytes=99 * KIB),
    Gpu("a10", sm=86, multiprocessors=72, shared_bytes=99 * KIB),
    Gpu("a100", sm=80, multiprocessors=108, shared_bytes=163 * KIB),
)}


TMA = (90, 100, 120)  # architectures that copy tiles of tensors


def hopper_only(name: str, requires: Sequence[str]) -> str:
    """Why a target does not get what only Hopper's multiprocessors have (wgmma)."""
    return only(name, requires, 90)


def only(name: str, requires: Sequence[str], *architectures: int) -> str:
    """Why a target does not get what these architectures have."""
    *names, last = sorted(gpu.name for gpu in GPUS.values() if gpu.sm in architectures)
    which = ", ".join(f"sm_{sm}" for sm in architectures)
    return f"is for {', '.join(names)} and {last} ({which}), '{name}' is {', '.join(requires)}"


@dataclass(frozen=True)
class AmdGpu:
    """`arch` as in gfx942. `shared_bytes`: the local memory that a work-group may ask for."""

    name: str
    arch: str
    shared_bytes: int

    @property
    def summary(self) -> str:
        return f"AMD {self.arch}, Triton: compile-only, nothing launches it; a compile refuses kernels that spill"


AMD_GPUS = {gpu.name: gpu for gpu in (AmdGpu("mi300x", arch="gfx942", shared_bytes=64 * KIB),)}

# Oldest driver that loads a cubin of this ELF ABI (NVIDIA's compatibility table: CUDA 12.x output, CUDA 13.x output).
MIN_DRIVER = {7: 525, 8: 580}
