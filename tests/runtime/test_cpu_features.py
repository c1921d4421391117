"""What the CPU can do, from the kernel's words to LLVM's."""

from __future__ import annotations

import pytest

from mlsdc.runtime.device.cpu_features import LEVELS, machine_name, parse_cpuinfo

V2 = {"popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"}
V3 = V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def test_x86_flags_get_llvms_names() -> None:
    text = "processor\t: 0\nflags\t\t: fpu abm pni sse4_2 avx2 avx512_vnni avx512_bf16\n\nprocessor\t: 1\nflags\t: x\n"
    assert parse_cpuinfo(text) == {"fpu", "lzcnt", "sse3", "sse4.2", "avx2", "avx512vnni", "avx512bf16"}


def test_arm_features_get_llvms_names() -> None:
    assert parse_cpuinfo("Features\t: fp asimd asimddp i8mm bf16\n") == {"fp", "neon", "dotprod", "i8mm", "bf16"}


@pytest.mark.parametrize("text", ["", "no colon here", "model name : x\n"])
def test_a_text_that_says_nothing_gives_nothing(text: str) -> None:
    assert parse_cpuinfo(text) == frozenset()


@pytest.mark.parametrize(("features", "name"), [
    (set(), "x86-64"), (V2, "x86-64-v2"), (V3, "x86-64-v3"), (V3 | {"avxvnni"}, "x86-64-v3+avxvnni"), (V4, "x86-64-v4"),
    (V4 | {"avx512vnni", "avx512bf16"}, "x86-64-v4+avx512vnni+avx512bf16"), (V4 - {"movbe"}, "x86-64-v2"),
])
def test_x86_machines_are_named_by_level(features: set[str], name: str) -> None:
    assert machine_name(frozenset(features), "x86_64") == name


def test_arm_machines_are_named_by_what_matters() -> None:
    assert machine_name(frozenset({"neon", "dotprod", "i8mm"}), "aarch64") == "aarch64+dotprod+i8mm"


def test_levels_name_no_feature_twice() -> None:
    every = [feature for _, needed in LEVELS["x86-64"] for feature in needed]
    assert len(every) == len(set(every))
