"""AMD GPUs: the Triton kernels of the NVIDIA targets, compiled for HIP. Compile-only: nothing here or in the runtime launches them.

What is checked is what a compile shows: every kernel of a model builds, keeps its values in registers and fits into local memory. Numbers
were never looked at: the interpreter runs the same templates for NVIDIA targets, AMD's code itself has run nowhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mlsdc.compiler.errors import CompileError
from mlsdc.runtime.manifest import KernelInfo, TargetInfo
from mlsdc.runtime.step import Limits
from mlsdc.targets.hardware import AMD_GPUS, AmdGpu, Gpu
from mlsdc.targets.nvidia import NvidiaTarget
from mlsdc.targets.protocol import KernelSpec
from mlsdc.targets.triton_build import HIDDEN, Variant, load_source, one_line, render, reproducible, split_abi, triton_type

WAVE = 64  # threads that run as one
VARIANTS = (Variant(4, 2), Variant(8, 2), Variant(4, 1), Variant(8, 1))  # the first that neither spills nor is too large
FACTS = {"vgpr_count": "vgprs", "agpr_count": "agprs", "sgpr_count": "sgprs"}  # of the code object's metadata -> of the manifest
SPILLS = ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")


class AmdTarget(NvidiaTarget):
    """Lowers as for NVIDIA, with the same packed weights; code for one architecture of `targets.hardware.AMD_GPUS`."""

    device = "hip"

    def __init__(self, name: str, limits: Limits, exact: bool = True) -> None:
        self.name = name
        self.exact = exact
        self.card: AmdGpu = AMD_GPUS[name]
        self.gpu = Gpu(name, sm=0, shared_bytes=self.card.shared_bytes)  # what lowerings ask: no limit on tiles by architecture is known
        self.requires = (self.card.arch,)
        self.limits = limits

    def build(self, specs: Sequence[KernelSpec], directory: Path) -> TargetInfo:
        """Sources and code objects in `directory/kernels/<name>`. Raises CompileError naming kernel and file."""
        folder = Path("kernels") / self.name
        (directory / folder).mkdir(parents=True, exist_ok=True)
        ordered = sorted(dict.fromkeys(specs), key=lambda spec: spec.key)
        with reproducible(self.gpu), ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
            built = list(pool.map(lambda spec: build_one(spec, self.card, directory, folder), ordered))
        kernels = {info.entry: info for info in built}
        files = tuple(sorted(path for info in built for path in (info.file, info.source)))
        return TargetInfo(self.name, self.device, self.requires, files, kernels)


def build_one(spec: KernelSpec, card: AmdGpu, directory: Path, folder: Path) -> KernelInfo:
    """Write the source, compile its variants until one fits, write the code object."""
    source, file = folder / f"k_{spec.key}.py", folder / f"{spec.key}.hsaco"
    (directory / source).write_text(render(spec), encoding="utf-8")
    rejected = []
    for variant in VARIANTS:
        code, used = compile_hsaco(spec, directory / source, card, variant)
        why = misfit(used, card)
        if why is None:
            (directory / file).write_bytes(code)
            resources = {name: value for name, value in used.items() if name not in SPILLS}
            return KernelInfo(spec.key, file.as_posix(), source.as_posix(), (*spec.abi, *HIDDEN), "compiled", resources)
        rejected.append(f"{variant.num_warps} waves, {variant.num_stages} stages: {why}")
    raise CompileError(f"{spec.key}: {source.name} does not fit {card.name}: {'; '.join(rejected)}")


def compile_hsaco(spec: KernelSpec, source: Path, card: AmdGpu, variant: Variant) -> tuple[bytes, dict[str, int]]:
    """A kernel's code object, and what its metadata says it needs. Raises CompileError."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: triton_type(type_) for name, type_ in split_abi(spec.abi)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, type_ in enumerate(signature.values()) if type_.startswith("*")}
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": False}
    try:
        kernel = triton_compile(
            ASTSource(load_source(source, spec.key), signature, {}, aligned), target=GPUTarget("hip", card.arch, WAVE), options=options)
    except Exception as error:  # triton raises many kinds; all of them mean that this kernel does not build
        raise CompileError(f"{spec.key}: {source.name} does not compile for {card.arch}: {one_line(error)}") from error
    text = kernel.asm["amdgcn"]
    used = {ours: metadata(text, theirs) for theirs, ours in FACTS.items()} | {name: metadata(text, name) for name in SPILLS}
    tensor_ops = len(re.findall(r"\bv_mfma", text))
    return kernel.asm["hsaco"], used | {
        "shared_bytes": kernel.metadata.shared, "threads": WAVE * kernel.metadata.num_warps, "num_stages": variant.num_stages,
        "tensor_ops": tensor_ops}


def metadata(text: str, name: str) -> int:
    """A number of the assembly's metadata, 0 where it is not said."""
    found = re.search(rf"\.{name}:\s+(\d+)", text)
    return int(found[1]) if found else 0


def misfit(used: dict[str, int], card: AmdGpu) -> str | None:
    """Why a kernel is not good enough for the machine."""
    if any(used[name] for name in SPILLS):
        return f"spills ({used['vgpr_spill_count']} vector and {used['sgpr_spill_count']} scalar registers)"
    if used["shared_bytes"] > card.shared_bytes:
        return f"{used['shared_bytes']} bytes of local memory, {card.shared_bytes} allowed"
    return None
