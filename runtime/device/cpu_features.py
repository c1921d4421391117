"""What this machine's CPU can do, in LLVM's feature names (`avx2`, `avx512vnni`, `dotprod`): targets say which of them they require."""

from __future__ import annotations

import platform
from pathlib import Path

# the kernel's name -> LLVM's, where they differ
_RENAMED = {
    "abm": "lzcnt", "asimd": "neon", "asimddp": "dotprod", "avx512_bf16": "avx512bf16", "avx512_bitalg": "avx512bitalg",
    "avx512_fp16": "avx512fp16", "avx512_vbmi2": "avx512vbmi2", "avx512_vnni": "avx512vnni", "avx512_vpopcntdq": "avx512vpopcntdq",
    "avx_vnni": "avxvnni", "lahf_lm": "sahf", "pni": "sse3", "sse4_1": "sse4.1", "sse4_2": "sse4.2",
}

# from the strongest down; a level needs all the features of its line and of the lines below it
LEVELS: dict[str, tuple[tuple[str, frozenset[str]], ...]] = {
    "x86-64": (
        ("v4", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})),
        ("v3", frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe"})),
        ("v2", frozenset({"popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"})),
    ),
}


def parse_cpuinfo(text: str) -> frozenset[str]:
    """Features from the text of /proc/cpuinfo: those of the first processor; none if the text names none."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(_RENAMED.get(flag, flag) for flag in value.split())
    return frozenset()


def cpu_features() -> frozenset[str]:
    """Features of this machine; empty where the system does not say (then only portable targets fit)."""
    try:
        return parse_cpuinfo(Path("/proc/cpuinfo").read_text())
    except OSError:
        return frozenset()


def machine_name(features: frozenset[str], machine: str | None = None) -> str:
    """A short name for messages: `x86-64-v4+avx512vnni`, `aarch64+dotprod+i8mm`."""
    machine = (machine or platform.machine()).lower()
    if machine in ("x86_64", "amd64"):
        name = "x86-64"
        levels = LEVELS["x86-64"]
        for i, (level, _) in enumerate(levels):
            if all(needed <= features for _, needed in levels[i:]):
                name = f"x86-64-{level}"
                break
        extras: tuple[str, ...] = ("avx512vnni", "avx512bf16") if name == "x86-64-v4" else ("avxvnni",)
    else:
        name, extras = machine, ("dotprod", "i8mm", "bf16")
    return "+".join([name, *(x for x in extras if x in features)])
