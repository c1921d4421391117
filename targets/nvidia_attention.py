"""Lowerings around the KV cache on NVIDIA GPUs: RoPE, append, tree attention over pages and scratch, commit."""

from __future__ import annotations

from collections.abc import Sequence

from mlsdc.compiler import ops_kv, ops_nn, ops_quant
from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.types import Type
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.program import InputArg, PoolArg
from mlsdc.runtime.step import BLOCK, Limits
from mlsdc.targets.nvidia import NvidiaTarget, a8_bytes, columns_of, lowers, sizes
from mlsdc.targets.protocol import Call, CallArg, Declined, KernelSpec, Lowering, TempRef, ValueRef
from mlsdc.targets.triton_build import TEMPLATES
from mlsdc.targets.values import geometry_of
from mlsdc.templates.params_triton import AppendKv, AttendCombine, AttendSplit, Commit, Rope

SPLIT_INPUTS = ("header", "positions", "row_slot", "ancestors", "seq_ctx", "seq_row", "seq_rows", "page_table", "scratch_table")
STATES = ("m_ptr: *f32", "l_ptr: *f32", "acc_ptr: *f32")
SPLIT_ABI = ("q_ptr: *f32", "pool: *u8", *(f"{name}: {'*i64' if name == 'ancestors' else '*i32'}" for name in SPLIT_INPUTS), *STATES)
APPEND_INPUTS = ("header", "positions", "row_seq", "row_slot", "page_table", "scratch_table")
COMBINE_ABI = (*STATES, "header: *i32", "positions: *i32")
HEAD_DIMS = (32, 64, 128, 256)


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


@lowers(ops_nn.Rope)
def lower_rope(target: NvidiaTarget, node: Node, op: ops_nn.Rope, graph: Graph) -> Lowering | Declined:
    x, table = (graph[name].type for name in node.inputs)
    _, heads, dim = sizes(x)
    return partial_rope(table, dim) or rope(node, Rope(heads * dim, 0, heads, dim, target.max_rows))


@lowers(ops_quant.RopeSlice)
def lower_rope_slice(target: NvidiaTarget, node: Node, op: ops_quant.RopeSlice, graph: Graph) -> Lowering | Declined:
    x, table = (graph[name].type for name in node.inputs)
    return partial_rope(table, op.head_dim) or rope(node, Rope(columns_of(x), op.start, op.heads, op.head_dim, target.max_rows))


def rope(node: Node, params: Rope) -> Lowering | Declined:
    if params.head_dim not in HEAD_DIMS:
        return Declined(f"head_dim {params.head_dim} is not one of {HEAD_DIMS}: Triton's blocks are powers of two")
    abi = ("x_ptr: *f32", "table_ptr: *f32", "header: *i32", "out_ptr: *f32")
    args: tuple[CallArg, ...] = (*(ValueRef(i) for i in node.inputs), InputArg("header"), ValueRef(node.name))
    call = Call(KernelSpec(params.template, params, abi), params.heads, "ROWS", args)
    return Lowering((call,), 4 * params.max_rows * params.heads * params.head_dim)


@lowers(ops_kv.AppendKv)
def lower_append(target: NvidiaTarget, node: Node, op: ops_kv.AppendKv, graph: Graph) -> Lowering | Declined:
    return append(node, op.layer, AppendKv(geometry_of(node.type), target.limits), ("k_ptr: *f32", "v_ptr: *f32"))


@lowers(ops_quant.AppendKvSlice)
def lower_append_slice(target: NvidiaTarget, node: Node, op: ops_quant.AppendKvSlice, graph: Graph) -> Lowering | Declined:
    geometry = geometry_of(node.type)
    x, table = (graph[name].type for name in node.inputs[1:3])
    params = AppendKv(geometry, target.limits, columns_of(x), op.k_start, op.v_start)
    return partial_rope(table, geometry.head_dim) or append(node, op.layer, params, ("x_ptr: *f32", "table_ptr: *f32"))


def append(node: Node, layer: int, params: AppendKv, sources: tuple[str, ...]) -> Lowering | Declined:
    if why := unsupported(params.geometry):
        return Declined(why)
    abi = (*sources, "pool: *u8", *(f"{name}: *i32" for name in APPEND_INPUTS))
    values = (ValueRef(i) for i in node.inputs[1:3])
    args: tuple[CallArg, ...] = (*values, PoolArg(params.geometry.k_offset(layer, 0)), *(InputArg(i) for i in APPEND_INPUTS))
    call = Call(KernelSpec(params.template, params, abi), params.geometry.num_kv_heads, "ROWS", args)
    return Lowering((call,), 0, alias_of=node.inputs[0])


@lowers(ops_kv.PagedAttention)
def lower_attention(target: NvidiaTarget, node: Node, op: ops_kv.PagedAttention, graph: Graph) -> Lowering | Declined:
    inputs: Sequence[Type] = [graph[name].type for name in node.inputs]
    geometry = geometry_of(inputs[1])
    _, heads, _ = sizes(inputs[0])
    if why := unsupported(geometry):
        return Declined(why)
    if op.sinks:
        return Declined("Triton's attention has windows, but none with sinks yet")
    if heads // geometry.num_kv_heads > 64:
        return Declined(f"{heads // geometry.num_kv_heads} query heads of a kv head do not fit a tile of 64 rows")
    max_rows, head_dim = target.max_rows, geometry.head_dim
    split = AttendSplit(geometry, target.limits, heads, op.scale, op.window, op.softcap)
    combine = AttendCombine(heads, head_dim, max_rows, split.splits, split.blocks_per_split * BLOCK, op.window, op.quantise)
    parts = (TempRef("m"), TempRef("l"), TempRef("acc"))
    split_call = Call(  # a row is never in more than one tile, so there are at most as many tiles as rows
        KernelSpec(AttendSplit.template, split, SPLIT_ABI), geometry.num_kv_heads * split.splits, "ROWS",
        (ValueRef(node.inputs[0]), PoolArg(geometry.k_offset(op.layer, 0)), *(InputArg(name) for name in SPLIT_INPUTS), *parts))
    combine_call = Call(
        KernelSpec(AttendCombine.template, combine, (*COMBINE_ABI, f"out_ptr: {'*i8' if op.quantise else '*f32'}")), heads, "ROWS",
        (*parts, InputArg("header"), InputArg("positions"), ValueRef(node.name)))
    states = split.splits * max_rows * heads
    columns = heads * head_dim
    return Lowering(
        (split_call, combine_call),
        result_bytes=a8_bytes(max_rows, columns) if op.quantise else 4 * max_rows * columns,
        temps={"m": 4 * states, "l": 4 * states, "acc": 4 * states * head_dim})


def commit_lowering(geometry: KvGeometry, limits: Limits) -> Lowering:
    """The launch that copies `commit_src` token slots to `commit_dst`. Raises CompileError for a format without fragments."""
    if not (TEMPLATES / f"kv_{geometry.format}_copy.py.jinja").exists():
        raise CompileError(f"kv format '{geometry.format}' has no Triton fragment that copies a token yet")
    params = Commit(geometry, limits.max_num_batched_tokens)
    abi = ("pool: *u8", "commit_src: *i32", "commit_dst: *i32", "header: *i32")
    args = (PoolArg(0), InputArg("commit_src"), InputArg("commit_dst"), InputArg("header"))
    return Lowering((Call(KernelSpec(params.template, params, abi), geometry.num_layers, "COMMITS", args),), 0)
