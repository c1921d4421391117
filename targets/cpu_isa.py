"""CPU targets: what LLVM is told, which features the machine must have, and which variants of the fragments the templates take.

All read the same packed weights (cpu_layout.py). Rows are exact within one ISA (law L2), not across them: sums of products are the same
whole numbers everywhere, but an ISA without fused multiply-add rounds twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DOTS = {"vnni512": False, "vnni256": False, "avx2": True, "portable": False, "sdot": True, "usdot": False}
"""Variants of templates/tir/dot.jinja -> whether they multiply signed weights, so that sums need no correction for the stored + 128."""


@dataclass(frozen=True)
class CpuIsa:
    """`requires` are LLVM's feature names, as runtime.device.cpu_features reports them; `futex` is Linux's system call number.

    `fma`, `rint` and `f16` say that fused multiply-add, rounding and f16 -> f32 are instructions: without one, LLVM would call a library.
    """

    name: str
    summary: str
    arch: str
    dot: str
    mcpu: str
    features: tuple[str, ...]
    requires: tuple[str, ...]
    futex: int
    fma: bool = True
    rint: bool = True
    f16: bool = True

    @property
    def triple(self) -> str:
        return f"{self.arch}-unknown-linux-gnu"

    @property
    def signed(self) -> bool:
        return DOTS[self.dot]

    def llvm_target(self) -> dict[str, Any]:
        return {"kind": "llvm", "mtriple": self.triple, "mcpu": self.mcpu, "mattr": [f"+{f}" for f in self.features]}


_V3 = ("avx2", "bmi2", "f16c", "fma")
_V4 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", *_V3)
_VNNI = ("avx512vnni",)

# From the best down: `cpu-native` and the loader take the first one that fits.
ISAS: dict[str, CpuIsa] = {
    isa.name: isa
    for isa in (
        CpuIsa("cpu-x86-64-v4", "x86-64 with AVX-512 and VNNI: Ice Lake, Zen 4 and later", "x86_64", "vnni512", "x86-64-v4", _VNNI, (*_V4, *_VNNI), 202),
        CpuIsa("cpu-x86-64-v4-256", "the same with 256-bit products, for CPUs that slow down at 512: Cascade Lake", "x86_64", "vnni256", "x86-64-v4",
               _VNNI, (*_V4, *_VNNI), 202),
        CpuIsa("cpu-x86-64-v3-vnni", "x86-64 with AVX2 and AVX-VNNI: Alder Lake and later", "x86_64", "vnni256", "x86-64-v3", ("avxvnni",),
               (*_V3, "avxvnni"), 202),
        CpuIsa("cpu-x86-64-v3", "x86-64 with AVX2: Haswell, Zen and later", "x86_64", "avx2", "x86-64-v3", (), _V3, 202),
        CpuIsa("cpu-x86-64", "any x86-64, without intrinsics: slow", "x86_64", "portable", "x86-64", (), ("sse2",), 202, fma=False, rint=False, f16=False),
        CpuIsa("cpu-aarch64-i8mm", "ARMv8 with i8mm: Graviton 3, Cortex-A510/710 and later", "aarch64", "usdot", "generic", ("neon", "dotprod", "i8mm"),
               ("neon", "dotprod", "i8mm"), 98),
        CpuIsa("cpu-aarch64-dotprod", "ARMv8 with dot products: Graviton 2, Cortex-A76 and later", "aarch64", "sdot", "generic", ("neon", "dotprod"),
               ("neon", "dotprod"), 98),
    )
}  # fmt: skip
