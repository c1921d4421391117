"""What a person may want to see of a GPU artifact's kernels: resources and occupancy in a table, PTX and machine code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Graph
from mlsdc.compiler.roofline import MACHINES, Cost, Load, step_costs
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.manifest import KernelInfo, KernelVariant, TargetInfo
from mlsdc.targets.cubin import disassembly
from mlsdc.targets.hardware import GPUS, Gpu
from mlsdc.targets.nvidia_values import bearers
from mlsdc.targets.nvrtc_build import compile_source
from mlsdc.targets.triton_build import Variant, compile_kernel, reproducible, tools_folder

RESERVED_SHARED = 1024  # bytes of a block that the driver keeps


def kernel_table(artifact: Artifact, target: TargetInfo, graph: Graph, load: Load) -> Iterator[str]:
    """A line a kernel, behind it one for each variant: what it takes, how many of its blocks a multiprocessor holds, and what a step of
    `load` costs in it (predicted)."""
    gpu, machine = GPUS[target.name], MACHINES[target.name]
    programs = artifact.programs(artifact.manifest.target_level.name, target)
    launches = Counter(launch.kernel for program in programs.values() for launch in program.launches)
    costs = {cost.node: cost for cost in step_costs(graph, load)}
    of_kernel: dict[str, list[Cost]] = {}
    ran = (launch for launch in programs["forward"].launches if launch.count != "ROWS" or launch.runs(load.rows))
    for node, kernel in bearers(ran).items():
        if node in costs:
            of_kernel.setdefault(kernel, []).append(costs[node])
    yield (f"{target.name}: {len(target.kernels)} kernels; us and MB: predicted for {load.rows} rows of {load.seqs} sequences at "
           f"{load.context:,} tokens")
    yield (f"{'launches':>8}{'regs':>6}{'shared':>8}{'threads':>8}{'blocks':>7}{'mma':>5}{'async':>6}{'MB':>9}{'us':>9}"
           f"  {'checked':12} kernel")
    for key, info in sorted(target.kernels.items(), key=lambda item: -sum(c.seconds(machine) for c in of_kernel.get(item[0], []))):
        mine = of_kernel.get(key, [])
        moved = f"{sum(cost.bytes for cost in mine) / 1e6:.2f}" if mine else ""
        time = f"{sum(cost.seconds(machine) for cost in mine) * 1e6:.1f}" if mine else ""
        yield f"{launches[key]:8}{taken(info, gpu)}{moved:>9}{time:>9}  {info.checked_by:12} {key}"
        for name, variant in info.variants.items():
            yield f"{'or':>8}{taken(variant, gpu)}{'':18}  {variant.checked_by:12}   {name}"


def taken(info: KernelInfo | KernelVariant, gpu: Gpu) -> str:
    r = info.resources
    return f"{r['registers']:6}{r['shared_bytes']:8}{r['threads']:8}{resident(info, gpu):7}{r['tensor_ops']:5}{r['async_copies']:6}"


def resident(info: KernelInfo | KernelVariant, gpu: Gpu) -> int:
    """Blocks of a kernel that fit on a multiprocessor at once, by registers, shared memory and threads."""
    r = info.resources
    by_registers = gpu.registers // (-(-r["registers"] // 8) * 8 * r["threads"])
    by_shared = (gpu.shared_bytes + RESERVED_SHARED) // (r["shared_bytes"] + RESERVED_SHARED)
    return min(by_registers, by_shared, gpu.max_threads // r["threads"])


def machine_code(artifact: Artifact, info: KernelInfo) -> str:
    """The cubin disassembled, by the nvdisasm that comes with triton."""
    try:
        return disassembly(artifact.path(info.file), tools_folder())
    except ImportError:
        raise CompileError("triton is not installed, machine code is read with its nvdisasm: pip install mlsdc[nvidia]") from None


def ptx(artifact: Artifact, target: TargetInfo, info: KernelInfo) -> str:
    """PTX of the kernel's source, compiled again with the options it was built with: artifacts hold machine code only."""
    gpu = GPUS[target.name]
    if info.source.endswith(".cu"):
        return compile_source(info.entry, artifact.path(info.source).read_text(encoding="utf-8"), "PTX").decode()
    variant = Variant(info.resources["threads"] // 32, info.resources["num_stages"])
    abi = [entry for entry in info.abi if not entry.endswith(": null")]
    with reproducible(gpu):
        text: str = compile_kernel(info.entry, abi, artifact.path(info.source), gpu.sm, variant).asm["ptx"]
    return text
