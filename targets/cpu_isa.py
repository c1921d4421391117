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


def x86(name: str, dot: str, mcpu: str, features: tuple[str, ...], requires: tuple[str, ...], summary: str, *, old: bool = False) -> CpuIsa:
    return CpuIsa(f"cpu-x86-64{name}", summary, "x86_64", dot, mcpu, features, requires, 202, not old, not old, not old)


def arm(name: str, dot: str, features: tuple[str, ...], summary: str) -> CpuIsa:
    return CpuIsa(f"cpu-aarch64{name}", summary, "aarch64", dot, "generic", features, features, 98)


_V3 = ("avx2", "bmi2", "f16c", "fma")
_V4 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", *_V3)
_VNNI = ("avx512vnni",)

# From the best down: `cpu-native` and the loader take the first one that fits.
ISAS: dict[str, CpuIsa] = {
    isa.name: isa
    for isa in (
        x86("-v4", "vnni512", "x86-64-v4", _VNNI, (*_V4, *_VNNI), "x86-64 with AVX-512 and VNNI: Ice Lake, Zen 4 and later"),
        x86("-v4-256", "vnni256", "x86-64-v4", _VNNI, (*_V4, *_VNNI), "the same with 256-bit products, for CPUs that slow down at 512"),
        x86("-v3-vnni", "vnni256", "x86-64-v3", ("avxvnni",), (*_V3, "avxvnni"), "x86-64 with AVX2 and AVX-VNNI: Alder Lake and later"),
        x86("-v3", "avx2", "x86-64-v3", (), _V3, "x86-64 with AVX2: Haswell, Zen and later"),
        x86("", "portable", "x86-64", (), ("sse2",), "any x86-64, without intrinsics: slow", old=True),
        arm("-i8mm", "usdot", ("neon", "dotprod", "i8mm"), "ARMv8 with i8mm: Graviton 3, Cortex-A510 and later"),
        arm("-dotprod", "sdot", ("neon", "dotprod"), "ARMv8 with dot products: Graviton 2, Cortex-A76 and later"),
    )
}
