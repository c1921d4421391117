"""Sources to cubins for one GPU, two at a time, each checked for spills and size; what was built before comes out of a cache by content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlsdc.compiler.cache import cache_folder
from mlsdc.compiler.errors import CompileError
from mlsdc.runtime.manifest import KernelInfo, KernelVariant, TargetInfo
from mlsdc.targets import nvrtc_build
from mlsdc.targets.cubin import facts, misfit, resources
from mlsdc.targets.hardware import Gpu
from mlsdc.targets.nvidia_variants import Alternative, alternatives
from mlsdc.targets.protocol import KernelSpec
from mlsdc.targets.triton_build import HIDDEN, TRITON_VERSION, AllRegisters, Variant, compile_cubin, render, reproducible, tools_folder
from mlsdc.targets.triton_checked import checked_by

# In order of preference: deep pipelines first (a page-table load in front of every K/V load halves their depth), then what spills less.
VARIANTS = {
    "attend_split": (Variant(4, 5), Variant(8, 5), Variant(4, 3), Variant(8, 3), Variant(4, 1), Variant(8, 1)),
    "attend_combine": (Variant(1, 3),),
    "append_kv": (Variant(1, 1),),
    "rotate": (Variant(1, 1),),
    "settle_kv": (Variant(1, 1),),
    "rope": (Variant(1, 1),),
    "rope_table": (Variant(1, 1),),
    "commit": (Variant(4, 1),),
    "follow": (Variant(1, 1),),
    "ngram_observe": (Variant(1, 1),),
    "ngram_propose": (AllRegisters(1, 1), AllRegisters(2, 1)),
    "linear_q": (Variant(4, 3), Variant(4, 2), Variant(8, 2), Variant(8, 1)),
    "gated_q": (Variant(4, 3), Variant(4, 2), Variant(8, 2), Variant(8, 1)),
    "linear_a16": (Variant(4, 4), Variant(4, 3), Variant(4, 2), Variant(8, 2), Variant(8, 1)),
    "linear": (Variant(4, 4), Variant(4, 3), Variant(4, 2), Variant(8, 1)),
    "gated": (Variant(4, 4), Variant(4, 3), Variant(4, 2), Variant(8, 1)),  # linear's and linear_a16's: the same sums in the same order
    "gated_a16": (Variant(4, 4), Variant(4, 3), Variant(4, 2), Variant(8, 2), Variant(8, 1)),
    "linear_f8": (Variant(4, 4), Variant(4, 3), Variant(4, 2), Variant(8, 1)),
    "gated_f8": (Variant(4, 4), Variant(4, 3), Variant(4, 2), Variant(8, 1)),
    "expert_tiles_q": (Variant(4, 3), Variant(4, 2), Variant(8, 2), Variant(8, 1)),
    "expert_linear": (Variant(4, 1),),  # the same warps as expert_rows, or their sums are of another order
    "expert_rows": (Variant(4, 3), Variant(4, 2), Variant(4, 1)),
    "expert_tiles": (Variant(4, 4), Variant(4, 3), Variant(4, 2), Variant(8, 1)),
    "sample_bound": (Variant(4, 1), Variant(2, 1), Variant(8, 1)),
    "quantise": (Variant(4, 1), Variant(8, 1), Variant(16, 1)),
    "rms_norm": (Variant(4, 1), Variant(8, 1), Variant(16, 1)),
}
WIDE = (Variant(8, 3), Variant(8, 2), Variant(4, 3), Variant(4, 2), Variant(8, 1))  # linears for many rows
TMA = {  # the same, their operands by TMA: four warps leave registers and shared memory for two programs a multiprocessor
    "linear_tma": (Variant(4, 4), Variant(4, 3), Variant(8, 3)),
    "linear_q_tma": (Variant(4, 6), Variant(4, 4), Variant(8, 4)),
    "gated_tma": (Variant(4, 4), Variant(4, 3), Variant(8, 3)),
    "gated_q_tma": (Variant(4, 6), Variant(4, 4), Variant(8, 4)),
}
OTHERS = (Variant(4, 1), Variant(8, 1))
THREADS = 2  # triton and ptxas let go of the interpreter lock; more threads than cores bring nothing
FORMAT = 2  # of a cache entry


def build(name: str, gpu: Gpu, requires: tuple[str, ...], specs: Sequence[KernelSpec], directory: Path, tunable: bool = False
          ) -> TargetInfo:
    """Write sources and cubins into `directory/kernels/<name>`, if `tunable` with those of nvidia_variants. Raises CompileError naming
    kernel and file."""
    folder = Path("kernels") / name
    (directory / folder).mkdir(parents=True, exist_ok=True)
    ordered = sorted(dict.fromkeys(specs), key=lambda spec: spec.key)
    with reproducible(gpu), ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(build_one, spec, gpu, directory, folder, tunable) for spec in ordered]
        try:
            kernels = {spec.key: future.result() for spec, future in zip(ordered, futures, strict=True)}
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    builds: list[KernelInfo | KernelVariant] = [*kernels.values(), *(one for info in kernels.values() for one in info.variants.values())]
    files = tuple(sorted({path for build in builds for path in (build.file, build.source)}))
    return TargetInfo(name, "cuda", requires, files, kernels)


def build_one(spec: KernelSpec, gpu: Gpu, directory: Path, folder: Path, tunable: bool = False) -> KernelInfo:
    """Write the source, compile its variants until one fits, write the cubin; if `tunable` also those that `mlsdc tune` may choose."""
    cuda = nvrtc_build.is_cuda(spec)
    source, file = folder / f"k_{spec.key}.{'cu' if cuda else 'py'}", folder / f"{spec.key}.cubin"
    text = nvrtc_build.render(spec) if cuda else render(spec)
    write_source(directory / source, text)
    entry = cache_entry(spec, gpu, text)
    found = read_entry(entry)
    if found is None:
        found = nvrtc_build.fitting(spec, gpu, text) if cuda else fitting(spec, gpu, directory / source, directory / file)
        write_entry(entry, found)
    cubin, used = found
    (directory / file).write_bytes(cubin)
    more: dict[str, KernelVariant] = {}
    if tunable and not cuda:
        default = Variant(used["threads"] // 32, used["num_stages"])
        made = {cubin}
        for other in alternatives(spec, gpu, default):
            if (built := build_variant(other, gpu, directory, file, made)) is not None:
                more[other.name] = built
    checked = nvrtc_build.checked_by() if cuda else checked_by(spec)
    return KernelInfo(spec.key, file.as_posix(), source.as_posix(), (*spec.abi, *HIDDEN), checked, used | most_programs(spec), more)


def build_variant(other: Alternative, gpu: Gpu, directory: Path, default: Path, made: set[bytes]) -> KernelVariant | None:
    """Another build of the kernel whose cubin is `default`; None if it does not fit, or is one of those that were made before."""
    spec, source, file = other.spec, default.with_name(f"k_{other.spec.key}.py"), default.with_name(f"{default.stem}.{other.name}.cubin")
    text = render(spec)
    write_source(directory / source, text)
    entry = cache_entry(spec, gpu, text, (other.how,))
    found = read_entry(entry)
    if found is None:
        found = attempt(spec, gpu, directory / source, directory / file, other.how)[0] or (b"", {})
        write_entry(entry, found)
    cubin, used = found
    if not cubin or cubin in made:
        for path in (file, source) if other.grid else (file,):
            (directory / path).unlink(missing_ok=True)
        return None
    made.add(cubin)
    (directory / file).write_bytes(cubin)
    resources = used | most_programs(spec)
    return KernelVariant(spec.key, file.as_posix(), source.as_posix(), checked_by(spec), resources, other.grid, other.grain)


def write_source(path: Path, text: str) -> None:
    """All at once: another thread may be reading it."""
    partial = path.with_name(f".{path.name}.{threading.get_ident()}")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def most_programs(spec: KernelSpec) -> dict[str, int]:
    most = getattr(spec.params, "most_programs", 0)
    return {"most_programs": most} if most else {}


def variants(spec: KernelSpec) -> tuple[Variant, ...]:
    if spec.template in TMA:
        return TMA[spec.template]
    return WIDE if getattr(spec.params, "block_m", 0) > 16 else VARIANTS.get(spec.template, OTHERS)


def fitting(spec: KernelSpec, gpu: Gpu, source: Path, file: Path) -> tuple[bytes, dict[str, int]]:
    """The cubin of the first variant that fits the machine without spilling, and what it needs. Raises CompileError."""
    rejected = []
    for variant in variants(spec):
        found, why = attempt(spec, gpu, source, file, variant)
        if found is not None:
            return found
        rejected.append(f"{variant.num_warps} warps, {variant.num_stages} stages: {why}")
    file.unlink()
    raise CompileError(f"{spec.key}: {source.name} does not fit {gpu.name}: {'; '.join(rejected)}")


def attempt(spec: KernelSpec, gpu: Gpu, source: Path, file: Path, variant: Variant) -> tuple[tuple[bytes, dict[str, int]] | None, str]:
    """A cubin, written to `file`, and what it needs; or why it does not fit the machine. Raises CompileError."""
    compiled = compile_cubin(spec, source, gpu, variant)
    file.write_bytes(compiled.cubin)
    used = resources(file, tools_folder())
    why = misfit(used, compiled.shared_bytes, compiled.threads, gpu)
    if why is not None:
        return None, why
    return (compiled.cubin, facts(compiled.cubin, used, compiled.shared_bytes, compiled.threads, variant.num_stages)), ""


def cache_entry(spec: KernelSpec, gpu: Gpu, text: str, tried: Sequence[Variant] | None = None) -> Path | None:
    """Where the kernel's cubin is kept; its name hashes all that the bytes depend on. `tried`: the variants, by default the spec's."""
    folder = cache_folder()
    if folder is None:
        return None
    how: tuple[object, ...] = (TRITON_VERSION, variants(spec) if tried is None else tried)
    if nvrtc_build.is_cuda(spec):
        how = (nvrtc_build.VERSION, nvrtc_build.OPTIONS)
    parts = (FORMAT, *how, gpu.sm, gpu.shared_bytes, gpu.registers, spec.abi, text)
    return folder / "kernels" / hashlib.sha256(repr(parts).encode()).hexdigest()


def read_entry(entry: Path | None) -> tuple[bytes, dict[str, int]] | None:
    """A cached kernel; None if there is none that is whole."""
    if entry is None:
        return None
    try:
        head, cubin = entry.read_bytes().split(b"\n", 1)
        found: dict[str, Any] = json.loads(head)
        if hashlib.sha256(cubin).hexdigest() != found.pop("sha256"):
            return None
        return cubin, {key: int(value) for key, value in found.items()}
    except (OSError, ValueError, KeyError):
        return None


def write_entry(entry: Path | None, found: tuple[bytes, dict[str, int]]) -> None:
    """Keep a kernel; a cache that cannot be written is as good as none."""
    if entry is None:
        return
    cubin, used = found
    head = json.dumps(used | {"sha256": hashlib.sha256(cubin).hexdigest()}, sort_keys=True).encode()
    partial = entry.with_name(f".{entry.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(head + b"\n" + cubin)
        partial.rename(entry)
