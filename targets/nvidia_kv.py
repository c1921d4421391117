"""Lowerings that write the paged KV cache on NVIDIA GPUs: append, pages of grouped formats, commit."""

from __future__ import annotations

from mlsdc.compiler import ops_kv, ops_quant
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.types import KvType
from mlsdc.runtime.kv_format import KvGeometry, parse_format
from mlsdc.runtime.program import InputArg, PoolArg
from mlsdc.runtime.step import Limits
from mlsdc.targets.nvidia import NvidiaTarget, columns_of, lowers, sizes
from mlsdc.targets.protocol import Call, CallArg, Declined, KernelSpec, Lowering, TempRef, ValueRef
from mlsdc.targets.values import geometry_of
from mlsdc.templates.params_triton_kv import TRITON_FORMATS, AppendKv, Commit, Paged, QuantiseKv, SettleKv

HEAD_DIMS = (32, 64, 128, 256)


def unsupported(geometry: KvGeometry) -> str | None:
    """Why there are no kernels for a KV cache like this."""
    kv, others = parse_format(geometry.format)
    for format in (kv, *others.values()):
        for block in (format.keys, format.values):
            if block.name not in TRITON_FORMATS:
                return f"kv format '{block.name}' has no Triton fragments yet"
    if geometry.head_dim not in HEAD_DIMS:
        return f"head_dim {geometry.head_dim} is not one of {HEAD_DIMS}: Triton's blocks are powers of two"
    return None


def kernel(params: Paged, *abi: str) -> KernelSpec:
    return KernelSpec(params.template, params, abi)


def inputs(*names: str) -> tuple[tuple[str, ...], tuple[InputArg, ...]]:
    """ABI entries and arguments of step inputs."""
    return tuple(f"{name}: {'*i64' if name == 'ancestors' else '*i32'}" for name in names), tuple(InputArg(name) for name in names)


def prologue(graph: Graph, limits: Limits) -> tuple[Lowering, ...]:
    """The arena's rows in 16 bits that all layers of a grouped format use, one after the other."""
    for node in graph.inputs():
        if isinstance(node.type, KvType) and geometry_of(node.type).grouped:
            geometry = geometry_of(node.type)
            return (Lowering((), 0, {"chunk": AppendKv(geometry, limits, geometry.kv.name).chunk_bytes}),)
    return ()


@lowers(ops_kv.AppendKv)
def lower_append(target: NvidiaTarget, node: Node, op: ops_kv.AppendKv, graph: Graph) -> Lowering | Declined:
    geometry = geometry_of(node.type)
    params = AppendKv(geometry, target.limits, geometry.layer_format(op.layer).name)
    return append(node, op.layer, params, ("k_ptr: *f32", "v_ptr: *f32"))


@lowers(ops_quant.AppendKvSlice)
def lower_append_slice(target: NvidiaTarget, node: Node, op: ops_quant.AppendKvSlice, graph: Graph) -> Lowering | Declined:
    geometry = geometry_of(node.type)
    x, table = (graph[name].type for name in node.inputs[1:3])
    format = geometry.layer_format(op.layer).name
    params = AppendKv(geometry, target.limits, format, columns_of(x), op.k_start, op.v_start, sizes(table)[2])
    return append(node, op.layer, params, ("x_ptr: *f32", "table_ptr: *f32"))


def append(node: Node, layer: int, params: AppendKv, sources: tuple[str, ...]) -> Lowering | Declined:
    """One launch, which quantises; of a grouped format a second one, for the pages that the rows fill."""
    geometry = params.geometry
    if why := unsupported(geometry):
        return Declined(why)
    given: tuple[CallArg, ...] = tuple(ValueRef(i) for i in node.inputs[1:3])
    pool = PoolArg(geometry.k_offset(layer, 0))
    if geometry.wide is None:
        abi, args = inputs("header", "positions", "row_seq", "row_slot", "page_table", "scratch_table")
        calls: tuple[Call, ...] = (
            Call(kernel(params, *sources, "pool: *u8", *abi), geometry.num_kv_heads, "ROWS", (*given, pool, *args)),)
    else:
        wide, chunk = PoolArg(geometry.wide.k_offset(layer, 0)), TempRef("chunk")
        abi, args = inputs("header", "positions", "row_seq", "row_slot", "scratch_table")
        write = Call(kernel(params, *sources, "wide: *u8", "chunk: *u8", *abi), geometry.num_kv_heads, "ROWS", (*given, wide, chunk, *args))
        abi, args = inputs("header", "positions", "row_seq", "row_slot", "seq_ctx", "seq_row", "page_table")
        fill = kernel(QuantiseKv(geometry, params.limits, params.format), "pool: *u8", "wide: *u8", "chunk: *u8", "tail_table: *i32", *abi)
        calls = write, Call(fill, geometry.num_kv_heads, "ROWS", (pool, wide, chunk, InputArg("tail_table"), *args))
    return Lowering(calls, 0, alias_of=node.inputs[0])


def settle(geometry: KvGeometry, limits: Limits, layer: int) -> Call:
    """The launch that takes a step's committed rows into the rings, after attention."""
    assert geometry.wide is not None
    abi, args = inputs("tail_table", "header", "positions", "row_seq", "row_slot", "seq_ctx", "seq_rows")
    spec = kernel(SettleKv(geometry, limits, geometry.layer_format(layer).name), "wide: *u8", "chunk: *u8", *abi)
    return Call(spec, 1, "ROWS", (PoolArg(geometry.wide.k_offset(layer, 0)), TempRef("chunk"), *args))


def commit_lowering(geometry: KvGeometry, limits: Limits) -> Lowering:
    """The launches that copy `commit_src` token slots to `commit_dst`: one for each run of layers of one format; of grouped formats those
    of 16 bits, then the pages that they fill."""
    abi, args = inputs("commit_src", "commit_dst", "header")
    calls = []
    copied = geometry if geometry.wide is None else geometry.wide
    for first, count, kv in copied.layer_runs():
        copy = kernel(Commit(copied, limits, kv.name, count), "pool: *u8", *abi)
        calls.append(Call(copy, count, "COMMITS", (PoolArg(copied.k_offset(first, 0)), *args)))
    if geometry.wide is not None:
        abi, args = inputs("tail_table", "header", "group_page", "group_seq", "group_first")
        for first, count, kv in geometry.layer_runs():
            fill = kernel(QuantiseKv(geometry, limits, kv.name, count), "pool: *u8", "wide: *u8", *abi)
            pools = PoolArg(geometry.k_offset(first, 0)), PoolArg(geometry.wide.k_offset(first, 0))
            calls.append(Call(fill, count * geometry.num_kv_heads, "GROUPS", (*pools, *args)))
    return Lowering(tuple(calls), 0)
