"""NVIDIA machines that kernels are generated for: what the compiler must know and a cubin must fit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """`sm` as in sm_90. `shared_bytes` is the most a block may ask for; `registers` are of one multiprocessor."""

    name: str
    sm: int
    shared_bytes: int
    registers: int = 65536


GPUS = {
    "h100": Gpu("h100", sm=90, shared_bytes=227 * 1024),
    "a100": Gpu("a100", sm=80, shared_bytes=163 * 1024),
}

# Oldest driver that loads a cubin of this ELF ABI (NVIDIA's compatibility table: CUDA 12.x output, CUDA 13.x output).
MIN_DRIVER = {7: 525, 8: 580}
