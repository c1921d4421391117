"""Triton kernels ahead of time: template -> readable source file -> cubin, the same bytes wherever and whenever it runs. No GPU, no driver.

Importing this module imports no triton; `compile_cubin` does.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from mlsdc.compiler.errors import CompileError
from mlsdc.runtime.kv_format import LANES
from mlsdc.runtime.step import BLOCK, Header
from mlsdc.runtime.tensor_map import tiles_of
from mlsdc.targets.hardware import Gpu
from mlsdc.targets.protocol import KernelSpec
from mlsdc.templates import params_triton
from mlsdc.templates.render import environment

TEMPLATES = Path(params_triton.__file__).parent / "triton"
TRITON_VERSION = "3.9.0"
SCALARS = {"f32": "fp32", "f64": "fp64", "bf16": "bf16", "i32": "i32", "i64": "i64", "u64": "u64", "u8": "u8", "i8": "i8"}
HIDDEN = ("global_scratch: null", "profile_scratch: null")  # every Triton kernel takes these two pointers after its own arguments


@dataclass(frozen=True)
class Variant:
    """How one source may be compiled; a build takes the first variant that fits the machine without spilling."""

    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class AllRegisters(Variant):
    """ptxas may use as many registers as there are: left alone it keeps some back for other warps, and spills."""

    def options(self) -> dict[str, int]:
        return {**super().options(), "maxnreg": 255}


@dataclass(frozen=True)
class Compiled:
    cubin: bytes
    variant: Variant
    threads: int
    shared_bytes: int


def render(spec: KernelSpec) -> str:
    """The kernel's source. Raises CompileError naming the kernel where the template asks for what the parameters lack."""
    try:
        template = environment().get_template(f"triton/{spec.template}.py.jinja")
        return template.render(params=spec.params, header=Header, block=BLOCK, lanes=LANES)
    except jinja2.TemplateError as error:
        raise CompileError(f"{spec.key}: templates/triton/{spec.template}.py.jinja: {type(error).__name__}: {error}") from None


def split_abi(abi: Sequence[str]) -> list[tuple[str, str]]:
    """`name: type` entries as pairs."""
    pairs = [entry.split(": ") for entry in abi]
    return [(name, type_) for name, type_ in pairs]


def triton_type(type_: str) -> str:
    """`*f32` -> `*fp32`; `map f32[64, 64]` -> `tensordesc<fp32[64, 64]>`."""
    if (tiles := tiles_of(type_)) is not None:
        return f"tensordesc<{SCALARS[tiles.dtype]}{list(tiles.shape)}>"
    return "*" * type_.count("*") + SCALARS[type_.lstrip("*")]


def load_source(path: Path, entry: str) -> Any:
    """Import a generated file (Triton reads a kernel's text back from its file) and return its kernel."""
    module_spec = importlib.util.spec_from_file_location(f"mlsdc_generated.{path.stem}", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return getattr(module, entry)


def tools_folder() -> Path:
    """Folder of the ptxas, cuobjdump and nvdisasm that come with triton."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@contextmanager
def reproducible(gpu: Gpu) -> Iterator[None]:
    """Triton settings under which the cubin depends on source and options only: no line info (it holds paths), an empty cache,
    and CUDA 12's ptxas up to sm_90, whose output drivers from 525 on load (the wheel's default for sm_90 needs 580)."""
    try:
        import triton
        from triton import knobs
    except ImportError:
        raise CompileError(f"triton is not installed, kernels need triton {TRITON_VERSION}: pip install mlsdc[nvidia]") from None
    if triton.__version__ != TRITON_VERSION:
        raise CompileError(f"triton {triton.__version__} is installed, kernels need triton {TRITON_VERSION}: pip install mlsdc[nvidia]")
    if knobs.runtime.interpret:
        raise CompileError("TRITON_INTERPRET is set: kernels cannot be compiled in this process; unset it")
    with (tempfile.TemporaryDirectory(prefix="mlsdc-triton-") as cache, knobs.compilation.scope(), knobs.cache.scope(),
          knobs.nvidia.scope(), parsing_in_turn()):
        knobs.compilation.disable_line_info = True
        knobs.cache.dir = cache
        if gpu.sm <= 90:
            knobs.nvidia.ptxas_blackwell = os.fspath(tools_folder() / "ptxas")
        yield


@contextmanager
def parsing_in_turn() -> Iterator[None]:
    """Threads that compile parse their kernels one at a time: CPython 3.11 counts the depth of the trees it makes once for all threads,
    and where a garbage collection lets another thread in, `ast.parse` raises SystemError (recursion depth mismatch)."""
    from triton.runtime.jit import JITFunction

    parse, lock = JITFunction.parse, threading.Lock()

    def in_turn(self: Any) -> Any:
        with lock:
            return parse(self)

    JITFunction.parse = in_turn
    try:
        yield
    finally:
        JITFunction.parse = parse


def compile_cubin(spec: KernelSpec, source: Path, gpu: Gpu, variant: Variant) -> Compiled:
    """Compile a generated file for one GPU; call it inside `reproducible`. Raises CompileError naming kernel, file and reason."""
    kernel = compile_kernel(spec.key, spec.abi, source, gpu.sm, variant)
    metadata = kernel.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
        raise CompileError(f"{spec.key}: {source.name} wants scratch memory or a cluster, which launches do not carry")
    check_maps(spec, metadata)
    return Compiled(kernel.asm["cubin"], variant, 32 * metadata.num_warps, metadata.shared)


def check_maps(spec: KernelSpec, metadata: Any) -> None:
    """Raises CompileError if Triton wants other boxes of a mapped tensor than launches tell the driver of."""
    ours = [tiles for _, type_ in split_abi(spec.abi) if (tiles := tiles_of(type_)) is not None]
    theirs = getattr(metadata, "tensordesc_meta", None) or []
    wanted = [(tiles.box, tiles.swizzle, tiles.element_bytes) for tiles in ours]
    found = [(tuple(each["block_size"]), each["swizzle"], each["elem_size"]) for each in theirs]
    if wanted != found or any(each["fp4_padded"] or each.get("is_im2col") for each in theirs):
        raise CompileError(f"{spec.key}: tensor maps of boxes {wanted} are given, Triton wants {found}")


def compile_kernel(key: str, abi: Sequence[str], source: Path, sm: int, variant: Variant) -> Any:
    """Triton's CompiledKernel of a generated file, without the hidden arguments in `abi`. Raises CompileError."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: triton_type(type_) for name, type_ in split_abi(abi)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, type_ in enumerate(signature.values()) if type_.startswith("*")}
    options = {**variant.options(), "enable_fp_fusion": False}
    try:
        return triton_compile(
            ASTSource(load_source(source, key), signature, {}, aligned), target=GPUTarget("cuda", sm, 32), options=options)
    except Exception as error:  # triton raises many kinds; all of them mean that this kernel does not build
        raise CompileError(f"{key}: {source.name} does not compile for sm_{sm}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[-300:]
