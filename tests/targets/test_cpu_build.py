"""What a build refuses, and what every ISA's objects look like to a linker."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from mlsdc.compiler.errors import CompileError
from mlsdc.runtime.device.cpu_features import cpu_features
from mlsdc.targets import cpu_build, native_target
from mlsdc.targets.cpu_isa import DOTS, ISAS
from mlsdc.targets.elf import symbols, undefined_symbols


@pytest.mark.parametrize("isa", ISAS.values(), ids=lambda isa: str(isa.name))
def test_the_walker_of_every_isa_needs_three_functions_of_the_process(tmp_path: Path, isa: cpu_build.CpuIsa) -> None:
    source = tmp_path / "walker.ll"
    source.write_text(cpu_build.walker_source(isa))
    elf = cpu_build.compile_walker(source, tmp_path / "walker.o").read_bytes()
    assert undefined_symbols(elf) <= {"memcpy", "sched_yield", "syscall"}
    assert {f"__tvm_ffi_mlsdc_{name}" for name in ("run", "worker", "stop")} <= symbols(elf).keys()
    assert elf[18] == {"x86_64": 62, "aarch64": 183}[isa.arch]


@pytest.mark.parametrize("isa", ISAS.values(), ids=lambda isa: str(isa.name))
def test_every_isa_names_a_feature_that_only_its_architecture_has(isa: cpu_build.CpuIsa) -> None:
    assert isa.dot in DOTS
    assert {"x86_64": {"sse2", "avx2"}, "aarch64": {"neon"}}[isa.arch] & set(isa.requires)


def test_native_is_the_first_that_fits() -> None:
    features = cpu_features()
    assert native_target() == next(name for name, isa in ISAS.items() if features.issuperset(isa.requires))


def test_no_linker_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(cpu_build.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CompileError, match="^target cpu-aarch64-i8mm: no linker for aarch64: install binutils-aarch64-linux-gnu"):
        cpu_build.link(ISAS["cpu-aarch64-i8mm"], [tmp_path / "a.o"], tmp_path / "a.so")


def test_this_machines_own_linker_is_never_used_for_another_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    assert not {"cc", "ld"} & {command[0] for command in cpu_build.linkers(other)}


def test_a_kernel_that_calls_a_library_is_refused(tmp_path: Path) -> None:
    isa = ISAS["cpu-x86-64"]
    source = tmp_path / "k.ll"
    source.write_text(f'target triple = "{isa.triple}"\ndeclare float @llvm.fma.f32(float, float, float)\n'
                      "define float @k(float %x) {\n  %y = call float @llvm.fma.f32(float %x, float %x, float %x)\n  ret float %y\n}\n")
    cpu_build.compile_walker(source, tmp_path / "k.o")
    with pytest.raises(CompileError, match="target cpu-x86-64: a kernel calls fmaf"):
        cpu_build.check_object(tmp_path / "k.o", isa)


@pytest.mark.parametrize("name", ["cpu-x86-64", "cpu-aarch64-dotprod"])
def test_a_library_is_linked_for_either_architecture(tmp_path: Path, name: str) -> None:
    isa = ISAS[name]
    if not cpu_build.linkers(isa.arch):
        pytest.skip(f"no linker for {isa.arch}")
    (tmp_path / "walker.ll").write_text(cpu_build.walker_source(isa))
    objects = [cpu_build.compile_walker(tmp_path / "walker.ll", tmp_path / "walker.o")]
    cpu_build.link(isa, objects, tmp_path / "kernels.so")
    elf = (tmp_path / "kernels.so").read_bytes()
    assert (elf[16], elf[18]) == (3, {"x86_64": 62, "aarch64": 183}[isa.arch])  # a shared object
