"""NVIDIA GPUs: kernels in Triton, compiled ahead of time without a GPU. Importing this imports neither triton nor torch.

So far the nodes around the KV cache have templates, `paged_attention`, `append_kv` and RoPE; everything else is declined with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.ops_kv import AppendKv, PagedAttention
from mlsdc.compiler.ops_nn import Rope
from mlsdc.compiler.ops_quant import AppendKvSlice, RopeSlice
from mlsdc.compiler.quantise import Q4, Q8
from mlsdc.compiler.types import GROUP, Dim, DType, KvType, TensorType, Type
from mlsdc.runtime.kv_format import KvGeometry, to_bf16
from mlsdc.runtime.manifest import KernelInfo, TargetInfo
from mlsdc.runtime.program import InputArg, PoolArg
from mlsdc.runtime.step import BLOCK, Limits
from mlsdc.targets.cubin import Resources, elf_abi, resources
from mlsdc.targets.hardware import GPUS, MIN_DRIVER, Gpu
from mlsdc.targets.protocol import Call, CallArg, Declined, KernelSpec, Lowering, Target, TempRef, ValueRef
from mlsdc.targets.triton_build import HIDDEN, TEMPLATES, Compiled, Variant, compile_cubin, render, reproducible, tools_folder
from mlsdc.targets.triton_checked import checked_by
from mlsdc.templates.params_triton import AppendKv as AppendKvParams
from mlsdc.templates.params_triton import AttendCombine, AttendSplit
from mlsdc.templates.params_triton import Rope as RopeParams

SPLIT_INPUTS = ("header", "positions", "row_slot", "ancestors", "seq_ctx", "seq_row", "seq_rows", "page_table", "scratch_table")
STATES = ("m_ptr: *f32", "l_ptr: *f32", "acc_ptr: *f32")
SPLIT_ABI = ("q_ptr: *f32", "pool: *u8", *(f"{name}: {'*i64' if name == 'ancestors' else '*i32'}" for name in SPLIT_INPUTS), *STATES)
APPEND_INPUTS = ("header", "positions", "row_seq", "row_slot", "page_table", "scratch_table")
COMBINE_ABI = (*STATES, "header: *i32", "positions: *i32")

# In order of preference: deep pipelines first (a page-table load in front of every K/V load halves their depth), then what spills less.
VARIANTS = {
    "attend_split": (Variant(4, 5), Variant(8, 5), Variant(8, 3), Variant(8, 1)),
    "attend_combine": (Variant(1, 3),),
    "append_kv": (Variant(1, 1),),
    "rope": (Variant(1, 1),),
}
PLAIN = {DType.F32: np.float32, DType.F16: np.float16}


HEAD_DIMS = (32, 64, 128, 256)


def geometry_of(type_: Type) -> KvGeometry:
    assert isinstance(type_, KvType)
    return KvGeometry(type_.format, type_.page_size, type_.num_layers, type_.num_kv_heads, type_.head_dim)


def sizes(type_: Type) -> list[int]:
    """Shape of a row-wise tensor, at the limit where it is symbolic."""
    assert isinstance(type_, TensorType)
    return [size.hi if isinstance(size, Dim) else size for size in type_.shape]


def columns_of(type_: Type) -> int:
    return sizes(type_)[1]


def unsupported(geometry: KvGeometry) -> str | None:
    """Why there are no kernels for a KV cache like this."""
    if not (TEMPLATES / f"kv_{geometry.format}.py.jinja").exists():
        return f"kv format '{geometry.format}' has no Triton fragments yet"
    if geometry.head_dim not in HEAD_DIMS:
        return f"head_dim {geometry.head_dim} is not one of {HEAD_DIMS}: Triton's blocks are powers of two"
    return None


def partial_rope(table: Type, head_dim: int) -> Declined | None:
    """RoPE that turns some of a head's channels only has no template."""
    half = sizes(table)[2]
    return None if 2 * half == head_dim else Declined(f"RoPE turns {2 * half} of {head_dim} channels, the template turns all")


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
        inputs = [graph[name].type for name in node.inputs]
        match node.op:
            case PagedAttention() as attention:
                return self._attention(node, attention, inputs)
            case AppendKv(layer):
                return self._append(node, layer, AppendKvParams(geometry_of(node.type), self.limits), ("k_ptr: *f32", "v_ptr: *f32"))
            case AppendKvSlice(layer, k_start, v_start):
                geometry = geometry_of(node.type)
                params = AppendKvParams(geometry, self.limits, columns_of(inputs[1]), k_start, v_start)
                return partial_rope(inputs[2], geometry.head_dim) or self._append(node, layer, params, ("x_ptr: *f32", "table_ptr: *f32"))
            case Rope():
                _, heads, dim = sizes(inputs[0])
                return partial_rope(inputs[1], dim) or self._rope(node, RopeParams(heads * dim, 0, heads, dim, self.max_rows))
            case RopeSlice(start, heads, dim):
                return partial_rope(inputs[1], dim) or self._rope(node, RopeParams(columns_of(inputs[0]), start, heads, dim, self.max_rows))
        return Declined(f"'{node.op.opname}' has no Triton template yet")

    def prologue(self, graph: Graph) -> Sequence[Lowering]:
        """None: a tile finds its sequence by itself, so the grid is fixed and a CUDA graph can hold it."""
        return ()

    def packed_bytes(self, type_: Type) -> int:
        tensor = self._plain(type_)
        return int(np.prod([int(size) for size in tensor.shape if isinstance(size, int)])) * (4 if tensor.dtype == DType.F32 else 2)

    def pack(self, type_: Type, rows: npt.NDArray[Any] | Q8 | Q4) -> npt.NDArray[np.uint8]:
        """Row-major, as is: plain dtypes only, until a linear has a template and with it a layout of its own."""
        tensor = self._plain(type_)
        values = np.ascontiguousarray(rows.dequantise() if isinstance(rows, Q8 | Q4) else rows, np.float32)
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

    @property
    def max_rows(self) -> int:
        return self.limits.max_num_batched_tokens

    def _append(self, node: Node, layer: int, params: AppendKvParams, sources: tuple[str, ...]) -> Lowering | Declined:
        """`sources` are the ABI of the node's inputs 1 and 2."""
        if why := unsupported(params.geometry):
            return Declined(why)
        abi = (*sources, "pool: *u8", *(f"{name}: *i32" for name in APPEND_INPUTS))
        values = (ValueRef(i) for i in node.inputs[1:3])
        args: tuple[CallArg, ...] = (*values, PoolArg(params.geometry.k_offset(layer, 0)), *(InputArg(i) for i in APPEND_INPUTS))
        return Lowering((Call(KernelSpec(params.template, params, abi), params.grid, None, args),), 0, alias_of=node.inputs[0])

    def _rope(self, node: Node, params: RopeParams) -> Lowering | Declined:
        if params.head_dim not in HEAD_DIMS:
            return Declined(f"head_dim {params.head_dim} is not one of {HEAD_DIMS}: Triton's blocks are powers of two")
        abi = ("x_ptr: *f32", "table_ptr: *f32", "header: *i32", "out_ptr: *f32")
        args: tuple[CallArg, ...] = (*(ValueRef(i) for i in node.inputs), InputArg("header"), ValueRef(node.name))
        call = Call(KernelSpec(params.template, params, abi), params.grid, None, args)
        return Lowering((call,), 4 * self.max_rows * params.heads * params.head_dim)

    def _attention(self, node: Node, op: PagedAttention, inputs: Sequence[Type]) -> Lowering | Declined:
        geometry = geometry_of(inputs[1])
        _, heads, _ = sizes(inputs[0])
        if why := unsupported(geometry):
            return Declined(why)
        if heads // geometry.num_kv_heads > 64:
            return Declined(f"{heads // geometry.num_kv_heads} query heads of a kv head do not fit a tile of 64 rows")
        max_rows, head_dim = self.max_rows, geometry.head_dim
        split = AttendSplit(geometry, self.limits, heads, op.scale, op.window, op.softcap)
        combine = AttendCombine(heads, head_dim, max_rows, split.splits, split.blocks_per_split * BLOCK, op.window, op.quantise)
        parts = (TempRef("m"), TempRef("l"), TempRef("acc"))
        split_call = Call(
            KernelSpec(AttendSplit.template, split, SPLIT_ABI), split.grid, None,
            (ValueRef(node.inputs[0]), PoolArg(geometry.k_offset(op.layer, 0)), *(InputArg(name) for name in SPLIT_INPUTS), *parts))
        combine_call = Call(
            KernelSpec(AttendCombine.template, combine, (*COMBINE_ABI, f"out_ptr: {'*i8' if op.quantise else '*f32'}")), combine.grid, None,
            (*parts, InputArg("header"), InputArg("positions"), ValueRef(node.name)))
        states = split.splits * max_rows * heads
        elements = max_rows * heads * head_dim
        return Lowering(
            (split_call, combine_call),
            result_bytes=elements + elements // GROUP * 4 if op.quantise else elements * 4,
            temps={"m": 4 * states, "l": 4 * states, "acc": 4 * states * head_dim})

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
