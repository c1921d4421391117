"""The CPU target: lowers fused nodes to launches of TIR kernels, over the layouts of cpu_layout. One instance per ISA and artifact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mlsdc.compiler import ops_core, ops_nn, ops_quant
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.ops import Op
from mlsdc.compiler.quantise import F8, Q4, Q8
from mlsdc.compiler.types import Dim, DType, KvType, TensorType, Type
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.manifest import TargetInfo
from mlsdc.runtime.program import InputArg, Tap
from mlsdc.runtime.step import Limits
from mlsdc.targets.cpu_isa import ISAS, CpuIsa
from mlsdc.targets.cpu_layout import a8_offsets, bf16_bytes, f8_bytes, pack_bf16, pack_f8, pack_q4, pack_q8, q4_bytes, q8_bytes
from mlsdc.targets.protocol import Call, CallArg, Declined, KernelSpec, Lowering, Target, TempRef, ValueRef
from mlsdc.targets.values import counted_rows, fine_args, fine_of, geometry_of, input_type, whole
from mlsdc.templates import params as P
from mlsdc.templates.params import padded

T = TypeVar("T", bound=Op)
LOWER: dict[type[Op], Callable[[CpuTarget, Node, Any, Graph], Lowering | Declined]] = {}
MAX_FINE = 4  # groups of a value that may have a second plane
TILE = 8  # rows of an activation tile: they share cache lines, so one thread writes them all
TINY = 16  # rows of a kernel that takes less time than waking a thread


def lowers(kind: type[T]) -> Callable[[Callable[[CpuTarget, Node, T, Graph], Lowering | Declined]], Callable[..., Lowering | Declined]]:
    """Register how nodes of an op are lowered."""

    def register(function: Callable[[CpuTarget, Node, T, Graph], Lowering | Declined]) -> Callable[..., Lowering | Declined]:
        LOWER[kind] = function
        return function

    return register


@dataclass(frozen=True)
class CpuTarget(Target):
    """Code for one ISA level at an artifact's limits."""

    isa: CpuIsa
    limits: Limits

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.isa.name

    @property
    def requires(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.isa.requires

    device = "cpu"

    def lower(self, node: Node, graph: Graph) -> Lowering | Declined:
        rule = LOWER.get(type(node.op))
        if rule is None:
            return Declined(f"no CPU kernel for {node.op.opname}")
        return rule(self, node, node.op, graph)

    def prologue(self, graph: Graph) -> Sequence[Lowering]:
        from mlsdc.targets.cpu_kv import plan_lowering

        plan = plan_lowering(graph, self.limits)
        return () if plan is None else (plan,)

    def commit(self, geometry: KvGeometry) -> Lowering:
        """The launches that copy committed tokens from scratch slots to pages."""
        from mlsdc.targets.cpu_kv import commit_lowering

        return commit_lowering(geometry, self.limits)

    def sample(self, logits: Tap, vocab_size: int, base: int) -> tuple[Lowering, int]:
        from mlsdc.targets.cpu_sample import sample_lowering

        return sample_lowering(logits, vocab_size, self.limits, base)

    def level_functions(self, kind: str, params: Mapping[str, Any]) -> Sequence[KernelSpec]:
        from mlsdc.targets.cpu_sample import guess_specs, ngram_specs

        return ngram_specs(int(params["order"])) if kind == "ngram" else guess_specs()

    def packed_bytes(self, type_: Type) -> int:
        assert isinstance(type_, TensorType)
        if type_.dtype is DType.Q8:
            n, k = whole(type_)
            return q8_bytes(n, k)
        if type_.dtype is DType.Q4:
            n, k = whole(type_)
            return q4_bytes(n, k)
        if type_.dtype is DType.BF16:
            n, k = whole(type_)
            return bf16_bytes(n, k)
        if type_.dtype is DType.F8:
            n, k = whole(type_)
            return f8_bytes(n, k)
        return 4 * int(np.prod(whole(type_)))

    def layout(self, type_: Type) -> str:
        """f32 lies as it is on every device."""
        return "f32" if isinstance(type_, TensorType) and type_.dtype is DType.F32 else "cpu"

    def pack(self, type_: Type, rows: npt.NDArray[Any] | Q8 | Q4 | F8) -> npt.NDArray[np.uint8]:
        if isinstance(rows, Q8):
            return pack_q8(rows)
        if isinstance(rows, Q4):
            return pack_q4(rows)
        if isinstance(rows, F8):
            return pack_f8(rows)
        if isinstance(type_, TensorType) and type_.dtype is DType.BF16:
            return pack_bf16(rows)
        return np.ascontiguousarray(rows, np.float32).view(np.uint8).reshape(-1)

    def build(self, specs: Sequence[KernelSpec], directory: Path) -> TargetInfo:
        from mlsdc.targets.cpu_build import build

        return build(self.isa, (*specs, STREAM_READ), directory)


def cpu_target(name: str, limits: Limits) -> CpuTarget:
    return CpuTarget(ISAS[name], limits)


def spec(template: str, params: Any, *abi: str) -> KernelSpec:
    return KernelSpec(template, params, abi)


STREAM_READ = spec("stream_read", P.StreamRead(), "X: i32", "Y: i32")  # no program's: what `mlsdc bench` compares programs with


def kv_geometry(graph: Graph) -> KvGeometry | None:
    """Geometry of the graph's KV cache input, if it has one."""
    for node in graph.inputs():
        if isinstance(node.type, KvType):
            return geometry_of(node.type)
    return None


def rows_of(type_: Type) -> tuple[int, str, int]:
    """Of a row-wise value: header word index, header word name, rows padded to whole tiles."""
    index, name, most = counted_rows(type_)
    return index, name, padded(most, 8)


def storage(type_: Type) -> int:
    """Bytes of a value in the arena."""
    if not isinstance(type_, TensorType):
        return 0
    sizes = [size.hi if isinstance(size, Dim) else size for size in type_.shape]
    rows = padded(sizes[0], 8)
    if type_.dtype in (DType.A8, DType.A16):
        return a8_offsets(rows, sizes[1], MAX_FINE if type_.dtype is DType.A16 else 0)[2]
    element = {DType.BOOL: 1, DType.BF16: 2}.get(type_.dtype, 4)
    return padded(rows * int(np.prod(sizes[1:])) * element, 64)


def fine_abi(fine: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"FINE{i}: int" for i in range(len(fine)))


def a8_args(value: str, rows_padded: int, k: int, fine: int = 0) -> tuple[CallArg, ...]:
    """The three addresses of an a8 or a16 value: codes, scales, corrections."""
    scales, corrections, _ = a8_offsets(rows_padded, k, fine)
    return ValueRef(value), ValueRef(value, scales), ValueRef(value, corrections)


A8_IN = ("XQ: i32", "SX: f32", "CS: f32")
A8_OUT = ("YQ: i32", "YS: f32", "YC: f32")
HEADER = InputArg("header")


@lowers(ops_nn.Embed)
def lower_embed(target: CpuTarget, node: Node, op: ops_nn.Embed, graph: Graph) -> Lowering | Declined:
    table = input_type(graph, node, 1)
    if table.dtype is not DType.Q8:
        return Declined(f"embedding table of {table.dtype}; the CPU reads q8")
    _, count, rows = rows_of(node.type)
    n, k = whole(table)
    kernel = spec("embed_q8", P.EmbedQ8(rows, n, k, op.scale), "W: q8", "S: q8", "TOK: i32", "Y: f32")
    weight = ValueRef(node.inputs[1])
    return Lowering((Call(kernel, 1, count, (weight, weight, ValueRef(node.inputs[0]), ValueRef(node.name)), TILE),), storage(node.type))


@lowers(ops_nn.RopeTable)
def lower_rope_table(target: CpuTarget, node: Node, op: ops_nn.RopeTable, graph: Graph) -> Lowering:
    _, count, rows = rows_of(node.type)
    (half,) = whole(input_type(graph, node, 1))
    kernel = spec("rope_table", P.RopeTable(rows, half, op.scaling), "POS: i32", "FREQ: f32", "Y: f32")
    return Lowering((Call(kernel, 1, count, (*(ValueRef(i) for i in node.inputs), ValueRef(node.name)), TINY),), storage(node.type))


@lowers(ops_nn.Rope)
def lower_rope(target: CpuTarget, node: Node, op: ops_nn.Rope, graph: Graph) -> Lowering:
    heads, dim = whole(input_type(graph, node, 0))
    return rope(node, graph, heads * dim, 0, heads, dim)


@lowers(ops_quant.RopeSlice)
def lower_rope_slice(target: CpuTarget, node: Node, op: ops_quant.RopeSlice, graph: Graph) -> Lowering:
    (columns,) = whole(input_type(graph, node, 0))
    return rope(node, graph, columns, op.start, op.heads, op.head_dim)


def rope(node: Node, graph: Graph, columns: int, start: int, heads: int, dim: int) -> Lowering:
    _, count, rows = rows_of(node.type)
    half = whole(input_type(graph, node, 1))[1]
    kernel = spec("rope", P.Rope(rows, columns, start, heads, dim, half), "X: f32", "TABLE: f32", "Y: f32")
    return Lowering((Call(kernel, 1, count, (*(ValueRef(i) for i in node.inputs), ValueRef(node.name)), TINY),), storage(node.type))


@lowers(ops_quant.Quantise)
def lower_quantise(target: CpuTarget, node: Node, op: ops_quant.Quantise, graph: Graph) -> Lowering | Declined:
    return quantise(node, P.NormQuantise(*counted(node), whole_columns(node.type), fine=len(op.fine)), op.fine)


@lowers(ops_quant.NormQuantise)
def lower_norm_quantise(target: CpuTarget, node: Node, op: ops_quant.NormQuantise, graph: Graph) -> Lowering | Declined:
    return quantise(node, P.NormQuantise(*counted(node), whole_columns(node.type), True, op.eps, op.offset, len(op.fine)), op.fine)


def counted(node: Node) -> tuple[int, int]:
    index, _, rows = rows_of(node.type)
    return index, rows


def whole_columns(type_: Type) -> int:
    assert isinstance(type_, TensorType) and isinstance(type_.shape[1], int)
    return type_.shape[1]


def quantise(node: Node, params: P.NormQuantise, fine: tuple[int, ...]) -> Lowering | Declined:
    if len(fine) > MAX_FINE:
        return Declined(f"{len(fine)} groups with a second plane; the CPU's layout has room for {MAX_FINE}")
    _, count, rows = rows_of(node.type)
    kernel = spec("norm_quantise", params, "X: f32", *(("G: f32",) if params.norm else ()), *A8_IN, "H: i32", *fine_abi(fine))
    args = (*(ValueRef(i) for i in node.inputs), *a8_args(node.name, rows, params.k, len(fine)), HEADER, *fine_args(fine))
    return Lowering((Call(kernel, 1, count, args, TILE),), storage(node.type))


@lowers(ops_quant.LinearQ)
def lower_linear_q(target: CpuTarget, node: Node, op: ops_quant.LinearQ, graph: Graph) -> Lowering | Declined:
    weight = input_type(graph, node, 1)
    if weight.dtype not in ops_quant.PACKED:
        return Declined(f"weight of {weight.dtype}; the CPU multiplies q8 and q4")
    n, k = whole(weight)
    if n % 16:
        return Declined(f"{n} output columns; the CPU's blocks have 16")
    index, _, rows = rows_of(node.type)
    fine = fine_of(graph, node.inputs[0])
    params = P.LinearQ(index, rows, str(weight.dtype), n, k, target.isa.dot, op.bias, op.residual, len(fine))
    extra = (("B: f32",) if op.bias else ()) + (("R: f32",) if op.residual else ())
    kernel = spec("linear_q", params, f"W: {weight.dtype}", *A8_IN, "Y: f32", *extra, "H: i32", *fine_abi(fine))
    args: tuple[CallArg, ...] = (
        ValueRef(node.inputs[1]), *a8_args(node.inputs[0], rows, k, len(fine)), ValueRef(node.name),
        *(ValueRef(i) for i in node.inputs[2:]), HEADER, *fine_args(fine))
    return Lowering((Call(kernel, n // 16, None, args),), storage(node.type), in_place_of=node.inputs[-1] if op.residual else None)


@lowers(ops_quant.GatedQuantise)
def lower_gated(target: CpuTarget, node: Node, op: ops_quant.GatedQuantise, graph: Graph) -> Lowering | Declined:
    weight = input_type(graph, node, 1)
    if weight.dtype not in ops_quant.PACKED:
        return Declined(f"weight of {weight.dtype}; the CPU multiplies q8 and q4")
    n2, k = whole(weight)
    index, _, rows = rows_of(node.type)
    fine = fine_of(graph, node.inputs[0])
    params = P.GatedQ(index, rows, str(weight.dtype), n2 // 2, k, op.act, target.isa.dot, len(fine))
    kernel = spec("gated_q", params, f"W: {weight.dtype}", *A8_IN, *A8_OUT, "H: i32", *fine_abi(fine))
    args: tuple[CallArg, ...] = (
        ValueRef(node.inputs[1]), *a8_args(node.inputs[0], rows, k, len(fine)), *a8_args(node.name, rows, n2 // 2), HEADER,
        *fine_args(fine))
    return Lowering((Call(kernel, n2 // 64, None, args),), storage(node.type))


@lowers(ops_core.GatherRows)
def lower_gather(target: CpuTarget, node: Node, op: ops_core.GatherRows, graph: Graph) -> Lowering:
    _, count, out = rows_of(node.type)
    x = input_type(graph, node, 0)
    kernel = spec("gather_rows", P.GatherRows(rows_of(x)[2], out, whole_columns(x)), "X: f32", "INDEX: i32", "Y: f32")
    return Lowering((Call(kernel, 1, count, (*(ValueRef(i) for i in node.inputs), ValueRef(node.name)), TINY),), storage(node.type))


@lowers(ops_core.ArgMax)
def lower_argmax(target: CpuTarget, node: Node, op: ops_core.ArgMax, graph: Graph) -> Lowering:
    _, count, rows = rows_of(node.type)
    (n,) = whole(input_type(graph, node, 0))
    part = P.ArgMax(rows, n, op.limit or n)
    first = Call(spec("argmax_part", part, "X: f32", "VALUE: f32", "INDEX: i32"), part.parts, count,
                 (ValueRef(node.inputs[0]), TempRef("values"), TempRef("indices")))
    second = Call(spec("argmax_join", P.ArgMax(rows, n, op.limit or n, join=True), "VALUE: f32", "INDEX: i32", "Y: i32"), 1, count,
                  (TempRef("values"), TempRef("indices"), ValueRef(node.name)), TINY)
    return Lowering((first, second), storage(node.type), {"values": rows * part.parts * 4, "indices": rows * part.parts * 4})


@lowers(ops_quant.Calibrated)
def lower_calibrated(target: CpuTarget, node: Node, op: ops_quant.Calibrated, graph: Graph) -> Lowering:
    return Lowering((), 0, alias_of=node.inputs[0])


@lowers(ops_core.Reshape)
def lower_reshape(target: CpuTarget, node: Node, op: ops_core.Reshape, graph: Graph) -> Lowering:
    return Lowering((), 0, alias_of=node.inputs[0])


from mlsdc.targets import cpu_f8, cpu_heads, cpu_kv, cpu_moe, cpu_plain  # noqa: E402, F401  (register more ops; they need what stands above)
