"""CPU targets: what LLVM is told, which features the machine must have, and which int8 dot the templates use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CpuIsa:
    """`requires` are LLVM's feature names, as runtime.device.cpu_features reports them; `futex` is Linux's system call number."""

    name: str
    arch: str
    dot: str
    mcpu: str
    features: tuple[str, ...]
    requires: tuple[str, ...]
    futex: int

    @property
    def triple(self) -> str:
        return f"{self.arch}-unknown-linux-gnu"

    def llvm_target(self) -> dict[str, Any]:
        return {"kind": "llvm", "mtriple": self.triple, "mcpu": self.mcpu, "mattr": [f"+{f}" for f in self.features]}


_V4 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "f16c", "bmi2")

ISAS: dict[str, CpuIsa] = {
    isa.name: isa
    for isa in (
        CpuIsa("cpu-x86-64-v4", "x86_64", "vnni512", "x86-64-v4", ("avx512vnni",), (*_V4, "avx512vnni"), futex=202),
    )
}
