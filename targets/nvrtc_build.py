"""CUDA C++ kernels ahead of time: template -> readable source file -> cubin by NVRTC. No GPU, driver, nvcc, host compiler or headers.

NVRTC is a library on PyPI, called through ctypes; that of CUDA 12, whose cubins drivers from 525 on load.
"""

from __future__ import annotations

import ctypes as C
import hashlib
import importlib.metadata
import importlib.util
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from mlsdc.compiler.errors import CompileError
from mlsdc.runtime.step import BLOCK, Header
from mlsdc.targets import cubin
from mlsdc.targets.cubin import Resources, facts, resources
from mlsdc.targets.hardware import Gpu, hopper_only
from mlsdc.targets.protocol import KernelSpec
from mlsdc.targets.triton_build import tools_folder
from mlsdc.templates import params_cuda
from mlsdc.templates.render import environment

if TYPE_CHECKING:
    from mlsdc.targets.protocol import Target

PACKAGE, VERSION = "nvidia-cuda-nvrtc-cu12", "12.9.86"
TEMPLATES = Path(params_cuda.__file__).parent / "cuda"
INSTALL = "pip install 'mlsdc[nvrtc]'"
SM = 90  # wgmma, setmaxnreg: sm_90a and nothing else
OPTIONS = (f"--gpu-architecture=sm_{SM}a", "--std=c++17", "--fmad=false", "--ptxas-options=-v")
# digest() of the templates that tests/targets/test_cuda_attention.py ran on a CPU
EMULATED = "6fc07261cd7e69ec0629dd16b1839d20b55d1a6249d720d7dbe2699e9f050cb0"


def refused(target: Target) -> str | None:
    """Why a target's attention cannot be CUDA C++; None if it can. Raises CompileError where NVRTC is not installed."""
    if target.requires != (f"sm_{SM}",) or target.device != "cuda":
        return hopper_only(target.name, target.requires)
    if target.exact:
        return "adds up a drafted row's ancestors in the order of the tree's slots; write target: {exact: false} beside it"
    library()
    return None


def is_cuda(spec: KernelSpec) -> bool:
    """Whether a kernel is CUDA C++."""
    return getattr(spec.params, "language", "triton") == "cuda"


def render(spec: KernelSpec) -> str:
    """The kernel's source, without runs of blank lines. Raises CompileError where the template asks for more than there is."""
    try:
        text = environment().get_template(f"cuda/{spec.template}.cu.jinja").render(params=spec.params, header=Header, block=BLOCK)
    except jinja2.TemplateError as error:
        raise CompileError(f"{spec.key}: templates/cuda/{spec.template}.cu.jinja: {type(error).__name__}: {error}") from None
    lines = text.split("\n")
    return "\n".join(line.rstrip() for i, line in enumerate(lines) if line.strip() or (i and lines[i - 1].strip())).rstrip() + "\n"


@cache
def library() -> Any:
    """NVRTC. Raises CompileError if the package is missing or another version: cubins would be other bytes."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise CompileError(f"{PACKAGE} is not installed, 'kernels: {{attention: nvrtc}}' needs {VERSION}: {INSTALL}") from None
    if version != VERSION:
        raise CompileError(f"{PACKAGE} {version} is installed, 'kernels: {{attention: nvrtc}}' needs {VERSION}: {INSTALL}")
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    folder = Path(next(iter(spec.submodule_search_locations or ()))) if spec else Path()
    try:
        return C.CDLL(str(folder / "lib" / "libnvrtc.so.12"))
    except OSError as error:
        raise CompileError(f"{PACKAGE}: its library cannot be loaded ({error}): {INSTALL}") from None


def compile_source(key: str, text: str, what: str = "CUBIN", options: tuple[str, ...] = OPTIONS) -> bytes:
    """The cubin (or `PTX`) of a source file. No path gets in: the program is named by its key. Raises CompileError."""
    nvrtc = library()
    program = C.c_void_p()
    name = f"k_{key}.cu"
    check(nvrtc.nvrtcCreateProgram(C.byref(program), text.encode(), name.encode(), 0, None, None), name)
    try:
        given = (C.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            log = take(nvrtc, program, "ProgramLog").decode(errors="replace")
            errors = [line for line in log.splitlines() if "error" in line] or log.splitlines() or ["no reason given"]
            raise CompileError(f"{key}: {name} does not compile for sm_{SM}a: {errors[0].strip()}")
        return take(nvrtc, program, what)
    finally:
        nvrtc.nvrtcDestroyProgram(C.byref(program))


def take(nvrtc: Any, program: C.c_void_p, what: str) -> bytes:
    """A result of NVRTC's: its size, then its bytes."""
    size = C.c_size_t()
    check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, C.byref(size)), what)
    data = C.create_string_buffer(size.value)
    check(getattr(nvrtc, f"nvrtcGet{what}")(program, data), what)
    return data.raw if what == "CUBIN" else data.value


def check(code: int, what: str) -> None:
    if code:
        raise CompileError(f"NVRTC failed at {what} with code {code}")


def fitting(spec: KernelSpec, gpu: Gpu, text: str) -> tuple[bytes, dict[str, int]]:
    """The cubin of a source and what it needs. Raises CompileError if it does not fit the machine, or is not what it should be."""
    params: Any = spec.params
    data = compile_source(spec.key, text)
    with tempfile.TemporaryDirectory(prefix="mlsdc-nvrtc-") as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(data)
        used = resources(file, tools_folder())
    if why := misfit(used, params.shared_bytes, params.threads, gpu):
        raise CompileError(f"{spec.key}: k_{spec.key}.cu does not fit {gpu.name}: {why}")
    return data, facts(data, used, params.shared_bytes, params.threads, params.stages)


def misfit(used: Resources, shared_bytes: int, threads: int, gpu: Gpu) -> str | None:
    """Why a cubin is not good enough, or is not what these kernels are for."""
    why = cubin.misfit(used, shared_bytes, threads, gpu)
    return why or (None if used.tensor_ops and used.async_copies else "it has no tensor-core instructions or no bulk copies")


def digest() -> str:
    """sha256 of the CUDA templates."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(TEMPLATES.glob("*.jinja")))).hexdigest()


def checked_by() -> str:
    """`emulated` while the templates are the text that ran on a CPU as C++, all but what only the machine can do; else `compiled`."""
    return "emulated" if digest() == EMULATED else "compiled"
