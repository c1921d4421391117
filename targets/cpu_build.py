"""Building the CPU's kernels: spec -> template -> readable source -> TVM script -> LLVM object -> one shared library.

No C compiler is needed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.timing import recording, timed
from mlsdc.runtime.manifest import KernelInfo, TargetInfo
from mlsdc.targets.cpu_isa import CpuIsa
from mlsdc.targets.elf import undefined_symbols
from mlsdc.targets.protocol import KernelSpec
from mlsdc.templates.render import render

ENTRY = "__tvm_ffi_"  # tvm-ffi's prefix of exported functions
FROM_PROCESS = frozenset({"TVMFFIErrorSetRaisedFromCStrParts", "memcpy", "memmove", "memset"})  # what kernels may call


def build(isa: CpuIsa, specs: Sequence[KernelSpec], directory: Path) -> TargetInfo:
    """Kernels and the launch walker as `kernels/<target>/kernels.so`, every kernel's source and the walker's LLVM IR beside it."""
    folder = directory / "kernels" / isa.name
    folder.mkdir(parents=True, exist_ok=True)
    kernels: dict[str, KernelInfo] = {}
    functions: dict[str, Any] = {}
    for spec in sorted({spec.key: spec for spec in specs}.values(), key=lambda s: s.key):
        source = folder / f"{spec.key}.py"
        with timed(f"kernel {spec.key}"):
            source.write_text(render(f"tir/{spec.template}.py.jinja", spec=spec, p=spec.params, isa=isa), encoding="utf-8")
            functions[spec.key] = load_function(source, spec)
        name = source.relative_to(directory).as_posix()
        kernels[spec.key] = KernelInfo(spec.key, f"kernels/{isa.name}/kernels.so", name, spec.abi, "compiled")
    walker = folder / "walker.ll"
    walker.write_text(walker_source(isa), encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="mlsdc-build-") as temp:
        if recording():  # they are compiled together: what each one costs is found by compiling it alone, too
            for key, function in functions.items():
                with timed(f"kernel {key}"):
                    compile_kernels(isa, {key: function}, Path(temp) / "alone.o")
        with timed("all kernels together, LLVM"):
            objects = [compile_kernels(isa, functions, Path(temp) / "kernels.o"), compile_walker(walker, Path(temp) / "walker.o")]
        link(isa, objects, folder / "kernels.so")
    files = tuple(sorted(p.relative_to(directory).as_posix() for p in folder.iterdir()))
    return TargetInfo(isa.name, "cpu", isa.requires, files, kernels)


def load_function(source: Path, spec: KernelSpec) -> Any:
    """The TVM PrimFunc of a generated file. TVM's script parser reads the file itself, so it must lie on disk."""
    module_name = "mlsdc_generated_" + hashlib.sha256(str(source).encode()).hexdigest()[:12]
    loader = importlib.util.spec_from_file_location(module_name, source)
    assert loader is not None and loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    keep = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        loader.loader.exec_module(module)
    except Exception as error:
        raise CompileError(f"kernel '{spec.key}': {source.name} does not parse: {first_line(error)}") from error
    finally:
        sys.dont_write_bytecode = keep
    return module.kernel


def first_line(error: BaseException) -> str:
    """What an error says first; one that only announces (`... failed:`) with the line it announces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


@cache
def pipeline() -> str:
    """Name of our TVM pipeline: the default one, then every function is marked as CPU code.

    Kernels take raw pointers, so MakePackedAPI cannot learn the device from a tensor argument; without the mark small local
    buffers fail to lower to stack slots.
    """
    import tvm
    from tvm import tirx
    from tvm.tirx.compilation_pipeline import get_tir_pipeline, register_tir_pipeline

    def factory() -> Any:
        base, host, device = get_tir_pipeline("s_tir")

        @tvm.transform.module_pass(opt_level=0)  # type: ignore[untyped-decorator]
        def run(module: Any, _: Any) -> Any:
            marked = {}
            for name, function in base(module).functions.items():
                body = tirx.AttrStmt("default", "device_id", 0, tirx.AttrStmt("default", "device_type", 1, function.body))
                marked[name] = function.with_body(body)
            return tvm.IRModule(marked)

        return run, host, device

    register_tir_pipeline("mlsdc", factory)
    return "mlsdc"


def compile_kernels(isa: CpuIsa, functions: dict[str, Any], out: Path) -> Path:
    import tvm

    name = pipeline()
    target = tvm.target.Target(isa.llvm_target())
    try:
        library = tvm.tirx.build(tvm.IRModule(functions), target=target, pipeline=name)
    except Exception as error:
        raise CompileError(f"target {isa.name}: kernels do not compile: {first_line(error)}") from error
    check_object_source(library.inspect_source("ll"), isa)
    library.write_to_file(str(out), "o")
    check_object(out, isa)
    return out


def check_object_source(ll: str, isa: CpuIsa) -> None:
    """A local buffer of 1 KiB or more becomes a heap allocation inside a loop: a generator bug."""
    if re.search(r"load ptr, ptr @__TVMBackendAllocWorkspace", ll):
        raise CompileError(f"target {isa.name}: a kernel allocates memory: a local buffer of 1 KiB or more")


def check_object(path: Path, isa: CpuIsa) -> None:
    """A transcendental, or an instruction that the ISA lacks, becomes a call of a library that nothing is linked to: a generator bug."""
    called = sorted(undefined_symbols(path.read_bytes()) - FROM_PROCESS)
    if called:
        raise CompileError(f"target {isa.name}: a kernel calls {', '.join(called)}, which no artifact brings")


def walker_source(isa: CpuIsa) -> str:
    return render("llvm/walker.ll.jinja", arch=isa.arch, triple=isa.triple, futex=isa.futex, spin_turns=30000, chunks_shift=2)


def compile_walker(source: Path, out: Path) -> Path:
    import tvm

    try:
        tvm.runtime.load_module(str(source)).write_to_file(str(out), "o")
    except Exception as error:
        raise CompileError(f"{source.name} does not compile: {first_line(error)}") from error
    return out


def linkers(arch: str) -> list[list[str]]:
    """This machine's commands that link for an architecture: cc and ld for its own, <arch>-linux-gnu-ld, ld.lld and ziglang for any."""
    own = platform.machine().lower().replace("amd64", "x86_64") == arch
    names = [*(["cc"] if own else []), f"{arch}-linux-gnu-ld", "ld.lld", *(["ld"] if own else [])]
    found = [[name, *(["-nostdlib", "-Wl,--build-id=none"] if name == "cc" else [])] for name in names if shutil.which(name)]
    if importlib.util.find_spec("ziglang") is not None:
        found.append([sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-gnu"])
    return found


def link(isa: CpuIsa, objects: Sequence[Path], out: Path) -> None:
    """A shared library by the first linker that can. Nothing is linked in: libc comes from the process. Raises CompileError."""
    tries = linkers(isa.arch)
    if not tries:
        package = f"binutils-{isa.arch.replace('_', '-')}-linux-gnu"
        raise CompileError(f"target {isa.name}: no linker for {isa.arch}: install {package} (or lld), or `pip install ziglang`")
    for linker in tries:
        command = [*linker, "-shared", "-o", str(out.resolve()), *(path.name for path in objects)]
        done = subprocess.run(command, cwd=objects[0].parent, capture_output=True, text=True, env=dict(os.environ, LC_ALL="C"), check=False)
        if done.returncode == 0:
            return
    said = done.stderr.strip().splitlines() or [str(done.returncode)]
    raise CompileError(f"{command[0]} could not link {out.name}: {said[-1]}")
