"""NVIDIA GPUs: kernels in Triton, compiled ahead of time without a GPU. Importing this imports neither triton nor torch.

So far one fused node has a template, `paged_attention`; everything else is declined with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.ops_kv import PagedAttention
from mlsdc.compiler.quantise import Q8
from mlsdc.compiler.types import GROUP, DType, KvType, TensorType, Type
from mlsdc.runtime.kv_format import KvGeometry, to_bf16
from mlsdc.runtime.manifest import KernelInfo, TargetInfo
from mlsdc.runtime.program import InputArg, PoolArg
from mlsdc.runtime.step import BLOCK, Limits
from mlsdc.targets.cubin import Resources, elf_abi, resources
from mlsdc.targets.hardware import GPUS, MIN_DRIVER, Gpu
from mlsdc.targets.protocol import Call, Declined, KernelSpec, Lowering, Target, TempRef, ValueRef
from mlsdc.targets.triton_build import HIDDEN, TEMPLATES, Compiled, Variant, compile_cubin, render, reproducible, tools_folder
from mlsdc.targets.triton_checked import checked_by
from mlsdc.templates.params_triton import AttendCombine, AttendSplit

SPLIT_INPUTS = ("header", "positions", "row_slot", "ancestors", "seq_ctx", "seq_row", "seq_rows", "page_table", "scratch_table")
STATES = ("m_ptr: *f32", "l_ptr: *f32", "acc_ptr: *f32")
SPLIT_ABI = ("q_ptr: *f32", "pool: *u8", *(f"{name}: {'*i64' if name == 'ancestors' else '*i32'}" for name in SPLIT_INPUTS), *STATES)
COMBINE_ABI = (*STATES, "header: *i32", "positions: *i32")

# In order of preference: deep pipelines first (a page-table load in front of every K/V load halves their depth), then what spills less.
VARIANTS = {
    "attend_split": (Variant(4, 5), Variant(8, 5), Variant(8, 3), Variant(8, 1)),
    "attend_combine": (Variant(1, 3),),
}
PLAIN = {DType.F32: np.float32, DType.F16: np.float16}


def key_of(spec: KernelSpec) -> str:
    return spec.key


class NvidiaTarget(Target):
    """Lowers for one GPU of `targets.hardware.GPUS` at an artifact's limits."""

    device = "cuda"

    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        self.gpu: Gpu = GPUS[name]
        self.requires = (f"sm_{self.gpu.sm}",)
        self.limits = limits

    def lower(self, node: Node, graph: Graph) -> Lowering | Declined:
        if isinstance(node.op, PagedAttention):
            return self._attention(node, node.op, graph)
        return Declined(f"'{node.op.opname}' has no Triton template yet")

    def prologue(self, graph: Graph) -> Sequence[Lowering]:
        """None: a tile finds its sequence by itself, so the grid is fixed and a CUDA graph can hold it."""
        return ()

    def packed_bytes(self, type_: Type) -> int:
        tensor = self._plain(type_)
        return int(np.prod([int(size) for size in tensor.shape if isinstance(size, int)])) * (4 if tensor.dtype == DType.F32 else 2)

    def pack(self, type_: Type, rows: npt.NDArray[Any] | Q8) -> npt.NDArray[np.uint8]:
        """Row-major, as is: plain dtypes only, until a linear has a template and with it a layout of its own."""
        tensor = self._plain(type_)
        values = np.ascontiguousarray(rows.dequantise() if isinstance(rows, Q8) else rows, np.float32)
        data = to_bf16(values) if tensor.dtype == DType.BF16 else values.astype(PLAIN[tensor.dtype])
        return data.reshape(-1).view(np.uint8)

    def build(self, specs: Sequence[KernelSpec], directory: Path) -> TargetInfo:
        folder = Path("kernels") / self.name
        (directory / folder).mkdir(parents=True, exist_ok=True)
        kernels = {}
        with reproducible(self.gpu):
            for spec in sorted(dict.fromkeys(specs), key=key_of):
                kernels[spec.key] = self._build_one(spec, directory, folder)
        files = tuple(sorted(path for info in kernels.values() for path in (info.file, info.source)))
        return TargetInfo(self.name, self.device, self.requires, files, kernels)

    def _attention(self, node: Node, op: PagedAttention, graph: Graph) -> Lowering | Declined:
        q, kv = graph[node.inputs[0]].type, graph[node.inputs[1]].type
        assert isinstance(q, TensorType)
        assert isinstance(kv, KvType)
        heads = q.shape[1]
        assert isinstance(heads, int)
        if not (TEMPLATES / f"kv_{kv.format}.py.jinja").exists():
            return Declined(f"kv format '{kv.format}' has no Triton fragments yet")
        if kv.head_dim not in (32, 64, 128, 256):
            return Declined(f"head_dim {kv.head_dim} is not 32, 64, 128 or 256, and Triton's blocks are powers of two")
        if heads // kv.num_kv_heads > 64:
            return Declined(f"{heads // kv.num_kv_heads} query heads of a kv head do not fit a tile of 64 rows")
        geometry = KvGeometry(kv.format, kv.page_size, kv.num_layers, kv.num_kv_heads, kv.head_dim)
        split = AttendSplit(geometry, self.limits, heads, op.scale, op.window, op.softcap)
        max_rows = self.limits.max_num_batched_tokens
        combine = AttendCombine(heads, kv.head_dim, max_rows, split.splits, split.blocks_per_split * BLOCK, op.window, op.quantise)
        parts = (TempRef("m"), TempRef("l"), TempRef("acc"))
        split_call = Call(
            KernelSpec(AttendSplit.template, split, SPLIT_ABI), split.grid, None,
            (ValueRef(node.inputs[0]), PoolArg(geometry.k_offset(op.layer, 0)), *(InputArg(name) for name in SPLIT_INPUTS), *parts))
        combine_call = Call(
            KernelSpec(AttendCombine.template, combine, (*COMBINE_ABI, f"out_ptr: {'*i8' if op.quantise else '*f32'}")), combine.grid, None,
            (*parts, InputArg("header"), InputArg("positions"), ValueRef(node.name)))
        states = split.splits * max_rows * heads
        elements = max_rows * heads * kv.head_dim
        return Lowering(
            (split_call, combine_call),
            result_bytes=elements + elements // GROUP * 4 if op.quantise else elements * 4,
            temps={"m": 4 * states, "l": 4 * states, "acc": 4 * states * kv.head_dim})

    def _build_one(self, spec: KernelSpec, directory: Path, folder: Path) -> KernelInfo:
        """Write the source, compile its variants until one fits, write the cubin."""
        source = folder / f"k_{spec.key}.py"
        (directory / source).write_text(render(spec))
        file = folder / f"{spec.key}.cubin"
        rejected = []
        for variant in VARIANTS[spec.template]:
            compiled = compile_cubin(spec, directory / source, self.gpu, variant)
            (directory / file).write_bytes(compiled.cubin)
            used = resources(directory / file, tools_folder())
            why = self._misfit(compiled, used)
            if why is None:
                return KernelInfo(
                    entry=spec.key, file=file.as_posix(), source=source.as_posix(), abi=(*spec.abi, *HIDDEN), checked_by=checked_by(spec),
                    resources={
                        "registers": used.registers, "stack_bytes": used.stack_bytes, "shared_bytes": compiled.shared_bytes,
                        "threads": compiled.threads, "num_stages": variant.num_stages, "elf_abi": elf_abi(compiled.cubin),
                        "min_driver": MIN_DRIVER[elf_abi(compiled.cubin)]})
            rejected.append(f"{variant.num_warps} warps, {variant.num_stages} stages: {why}")
        (directory / file).unlink()
        raise CompileError(f"{spec.key}: {source} does not fit {self.name}: {'; '.join(rejected)}")

    def _misfit(self, compiled: Compiled, used: Resources) -> str | None:
        """Why a cubin is not good enough for the machine; Triton checks none of this when it compiles ahead of time."""
        if used.stack_bytes or used.local_ops:
            return f"spills ({used.stack_bytes} bytes of stack, {used.local_ops} local loads and stores)"
        if compiled.shared_bytes > self.gpu.shared_bytes:
            return f"{compiled.shared_bytes} bytes of shared memory, {self.gpu.shared_bytes} allowed"
        if used.registers * compiled.threads > self.gpu.registers:
            return f"{used.registers} registers x {compiled.threads} threads, {self.gpu.registers} there are"
        return None

    def _plain(self, type_: Type) -> TensorType:
        if not isinstance(type_, TensorType) or type_.dtype not in (*PLAIN, DType.BF16):
            raise CompileError(f"{self.name}: no layout for a weight of type {type_} yet")
        return type_
