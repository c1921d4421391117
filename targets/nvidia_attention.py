"""RoPE and tree attention over pages and scratch on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from mlsdc.compiler import ops_kv, ops_nn, ops_quant
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.types import Type
from mlsdc.runtime.kv_format import KvFormat
from mlsdc.runtime.program import InputArg, PoolArg
from mlsdc.runtime.step import BLOCK
from mlsdc.targets.nvidia import NvidiaTarget, a8_bytes, columns_of, lowers, sizes
from mlsdc.targets.nvidia_kv import HEAD_DIMS, inputs, kernel, settle, unsupported
from mlsdc.targets.protocol import Call, CallArg, Declined, KernelSpec, Lowering, TempRef, ValueRef
from mlsdc.targets.values import geometry_of
from mlsdc.templates.params_cuda import MOST_COLUMNS, AttendCuda, misfits
from mlsdc.templates.params_triton import Rope
from mlsdc.templates.params_triton_kv import AttendCoarse, AttendCombine, AttendSplit, Rotate

SPLIT_INPUTS = ("header", "positions", "row_slot", "ancestors", "seq_ctx", "seq_row", "seq_rows", "page_table", "scratch_table")
STATES = ("m_ptr: *f32", "l_ptr: *f32", "acc_ptr: *f32")
MOST_GROUP = 64  # query heads of a kv head


def most_tile(sm: int, kv: KvFormat, head_dim: int) -> int:
    """Rows of a tile of attention that do not spill: as compiled (`mlsdc targets --kernels`), else the fewest."""
    if sm < 120 and (kv.name == "bf16" or (sm == 90 and head_dim <= 64)):
        return 64
    if not 80 <= sm < 120 or kv.grouped or (sm != 90 and head_dim > 64):
        return 16
    if head_dim <= 64:
        return 32
    return 64 if {kv.keys.name, kv.values.name} <= {"int8", "fp8"} else 32


@lowers(ops_nn.Rope)
def lower_rope(target: NvidiaTarget, node: Node, op: ops_nn.Rope, graph: Graph) -> Lowering | Declined:
    x, table = (graph[name].type for name in node.inputs)
    _, heads, dim = sizes(x)
    return rope(node, Rope(heads * dim, 0, heads, dim, sizes(table)[2], target.max_rows))


@lowers(ops_quant.RopeSlice)
def lower_rope_slice(target: NvidiaTarget, node: Node, op: ops_quant.RopeSlice, graph: Graph) -> Lowering | Declined:
    x, table = (graph[name].type for name in node.inputs)
    return rope(node, Rope(columns_of(x), op.start, op.heads, op.head_dim, sizes(table)[2], target.max_rows))


def rope(node: Node, params: Rope) -> Lowering | Declined:
    if params.head_dim not in HEAD_DIMS:
        return Declined(f"head_dim {params.head_dim} is not one of {HEAD_DIMS}: Triton's blocks are powers of two")
    abi = ("x_ptr: *f32", "table_ptr: *f32", "header: *i32", "out_ptr: *f32")
    args: tuple[CallArg, ...] = (*(ValueRef(i) for i in node.inputs), InputArg("header"), ValueRef(node.name))
    call = Call(KernelSpec(params.template, params, abi), params.heads, "ROWS", args)
    return Lowering((call,), 4 * params.max_rows * params.heads * params.head_dim)


@lowers(ops_kv.PagedAttention)
def lower_attention(target: NvidiaTarget, node: Node, op: ops_kv.PagedAttention, graph: Graph) -> Lowering | Declined:
    types: Sequence[Type] = [graph[name].type for name in node.inputs]
    geometry = geometry_of(types[1])
    _, heads, head_dim = sizes(types[0])
    if why := unsupported(geometry):
        return Declined(why)
    if heads // geometry.num_kv_heads > MOST_GROUP:
        return Declined(f"{heads // geometry.num_kv_heads} query heads of a kv head do not fit a tile of {MOST_GROUP} rows")
    max_rows, kv = target.max_rows, geometry.layer_format(op.layer)
    tile = most_tile(target.gpu.sm, kv, head_dim)
    fast = not target.exact and not 0 < op.window < BLOCK  # a tree is at most BLOCK deep: wider windows hide none of a row's ancestors
    coarse = op.coarse and "int8n" in (kv.keys.name, kv.values.name)
    split = (AttendCoarse if coarse else AttendSplit)(
        geometry, target.limits, kv.name, heads, op.scale, tile, op.window, op.softcap, op.sinks, fast)
    if target.attention == "nvrtc":
        if why := misfits(geometry, kv.name, split.group):
            return Declined(f"attention by nvrtc does not do {why}: leave out 'kernels: {{attention: nvrtc}}'")
        split = AttendCuda(geometry, target.limits, kv.name, heads, op.scale, MOST_COLUMNS[head_dim], op.window, op.softcap, op.sinks)
    first_by = 0 if op.sinks else op.window  # with sinks a row's first split is the first of all
    combine = AttendCombine(
        heads, head_dim, max_rows, split.splits, split.blocks_per_split * BLOCK, first_by, op.quantise, kv.values.rotated)
    states = split.splits * max_rows * heads
    temps = {"m": 4 * states, "l": 4 * states, "acc": 4 * states * head_dim}
    parts = (TempRef("m"), TempRef("l"), TempRef("acc"))
    calls: list[Call] = []
    abi, args = inputs(*SPLIT_INPUTS)
    given: list[tuple[str, CallArg]] = [("q_ptr: *f32", ValueRef(node.inputs[0]))]
    if kv.keys.rotated:
        turn = Rotate(heads, head_dim)
        spec = KernelSpec(turn.template, turn, ("x_ptr: *f32", "header: *i32", "out_ptr: *f32"))
        calls.append(Call(spec, heads, "ROWS", (ValueRef(node.inputs[0]), InputArg("header"), TempRef("turned"))))
        given.append(("turned_ptr: *f32", TempRef("turned")))
        temps["turned"] = 4 * max_rows * heads * head_dim
    given.append(("pool: *u8", PoolArg(geometry.k_offset(op.layer, 0))))
    if geometry.wide is not None:
        wide = PoolArg(geometry.wide.k_offset(op.layer, 0))
        given += [("wide: *u8", wide), ("chunk: *u8", TempRef("chunk")), ("tail_table: *i32", InputArg("tail_table"))]
    # a row is never in more than one tile, so there are at most as many tiles as rows
    calls.append(Call(kernel(split, *(entry for entry, _ in given), *abi, *STATES), geometry.num_kv_heads * split.splits, "ROWS",
                      (*(arg for _, arg in given), *args, *parts)))
    out = f"out_ptr: {'*i8' if op.quantise else '*f32'}"
    calls.append(Call(KernelSpec(combine.template, combine, (*STATES, "header: *i32", "positions: *i32", out)), heads, "ROWS",
                      (*parts, InputArg("header"), InputArg("positions"), ValueRef(node.name))))
    if geometry.wide is not None:
        calls.append(settle(geometry, target.limits, op.layer))
    columns = heads * head_dim
    return Lowering(tuple(calls), a8_bytes(max_rows, columns) if op.quantise else 4 * max_rows * columns, temps)
