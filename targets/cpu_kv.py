"""CPU lowerings over the paged KV cache: writes, attention, commits. A kernel is made for the layers of one format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsdc.compiler import ops_kv, ops_quant
from mlsdc.compiler.graph import Graph, Node
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.program import InputArg, PoolArg
from mlsdc.runtime.step import Limits
from mlsdc.targets.cpu import A8_OUT, HEADER, TILE, TINY, a8_args, kv_geometry, lowers, spec, storage
from mlsdc.targets.protocol import Call, CallArg, Lowering, TempRef, ValueRef
from mlsdc.targets.values import geometry_of, input_type, whole
from mlsdc.templates import params_kv as K

if TYPE_CHECKING:
    from mlsdc.targets.cpu import CpuTarget


def plan_lowering(graph: Graph, limits: Limits) -> Lowering | None:
    """The launch that lists a step's attention work; None for a graph without attention."""
    geometry = kv_geometry(graph)
    if geometry is None or not any(isinstance(node.op, ops_kv.PagedAttention) for node in graph):
        return None
    plan = K.AttendPlan(geometry, limits, geometry.kv)
    call = Call(spec("attend_plan", plan, "POS: i32", "ROW: i32", "ROWS: i32", "WORK: i32", "H: i32"), 1, None,
                (InputArg("positions"), InputArg("seq_row"), InputArg("seq_rows"), TempRef("work"), InputArg("header")))
    return Lowering((call,), 0, {"work": plan.max_items * 16, **({"chunk": plan.chunk_bytes} if geometry.grouped else {})})


def commit_lowering(geometry: KvGeometry, limits: Limits) -> Lowering:
    """The launches that copy committed tokens from scratch slots to pages: one for each run of layers of one format."""
    calls = []
    if geometry.wide is not None:
        wide = K.Commit(geometry.wide, limits, geometry.wide.kv, geometry.num_layers)
        copy = spec("commit_kv", wide, "POOL: pool", "SRC: i32", "DST: i32")
        calls.append(Call(copy, geometry.num_layers, "COMMITS", (PoolArg(0), InputArg("commit_src"), InputArg("commit_dst"))))
        for first, count, kv in geometry.layer_runs():
            kernel = spec("quantise_kv", K.QuantiseKv(geometry, limits, kv, count), "POOL: pool", "WIDE: pool", "TAIL: i32", "PAGE: i32",
                          "SEQ: i32", "START: i32")
            pools = PoolArg(geometry.k_offset(first, 0)), PoolArg(geometry.wide.k_offset(first, 0))
            inputs = (InputArg(name) for name in ("tail_table", "group_page", "group_seq", "group_first"))
            calls.append(Call(kernel, count * geometry.num_kv_heads, "GROUPS", (*pools, *inputs)))
        return Lowering(tuple(calls), 0)
    for first, count, kv in geometry.layer_runs():
        kernel = spec("commit_kv", K.Commit(geometry, limits, kv, count), "POOL: pool", "SRC: i32", "DST: i32")
        calls.append(Call(kernel, count, "COMMITS", (PoolArg(geometry.k_offset(first, 0)), InputArg("commit_src"), InputArg("commit_dst"))))
    return Lowering(tuple(calls), 0)


@lowers(ops_quant.AppendKvSlice)
def lower_append_slice(target: CpuTarget, node: Node, op: ops_quant.AppendKvSlice, graph: Graph) -> Lowering:
    geometry = geometry_of(node.type)
    (columns,) = whole(input_type(graph, node, 1))
    half = whole(input_type(graph, node, 2))[1]
    params = K.AppendKv(geometry, target.limits, geometry.layer_format(op.layer), True, columns, op.k_start, op.v_start, half)
    return append(node, op.layer, params, ("X: f32", "TABLE: f32"))


@lowers(ops_kv.AppendKv)
def lower_append(target: CpuTarget, node: Node, op: ops_kv.AppendKv, graph: Graph) -> Lowering:
    geometry = geometry_of(node.type)
    return append(node, op.layer, K.AppendKv(geometry, target.limits, geometry.layer_format(op.layer)), ("KX: f32", "VX: f32"))


def append(node: Node, layer: int, params: K.AppendKv, sources: tuple[str, ...]) -> Lowering:
    if params.grouped:
        return append_grouped(node, layer, params, sources)
    abi = ("POOL: pool", "POS: i32", "SEQ: i32", "SLOT: i32", "PAGES: i32", "SCRATCH: i32")
    kernel = spec("append_kv", params, *sources, *abi)
    args: tuple[CallArg, ...] = (
        *(ValueRef(i) for i in node.inputs[1:3]), PoolArg(params.geometry.k_offset(layer, 0)),
        *(InputArg(i) for i in ("positions", "row_seq", "row_slot", "page_table", "scratch_table")))
    return Lowering((Call(kernel, 1, "ROWS", args, TINY),), 0, alias_of=node.inputs[0])


def append_grouped(node: Node, layer: int, params: K.AppendKv, sources: tuple[str, ...]) -> Lowering:
    """Rows in 16 bits into scratch slots and the arena; then the pages that committed rows fill."""
    geometry = params.geometry
    wide = PoolArg(params.wide.k_offset(layer, 0))
    write = spec("append_kv", params, *sources, "WIDE: pool", "CHUNK: bf16", "POS: i32", "SEQ: i32", "SLOT: i32", "SCRATCH: i32")
    rows: tuple[CallArg, ...] = (
        *(ValueRef(i) for i in node.inputs[1:3]), wide, TempRef("chunk"),
        *(InputArg(i) for i in ("positions", "row_seq", "row_slot", "scratch_table")))
    fill = spec("quantise_kv", K.QuantiseKv(geometry, params.limits, params.format), "POOL: pool", "WIDE: pool", "TAIL: i32", "CHUNK: bf16",
                "SLOT: i32", "CTX: i32", "ROW: i32", "ROWS: i32", "PAGES: i32")
    groups: tuple[CallArg, ...] = (
        PoolArg(geometry.k_offset(layer, 0)), wide, InputArg("tail_table"), TempRef("chunk"),
        *(InputArg(i) for i in ("row_slot", "seq_ctx", "seq_row", "seq_rows", "page_table")))
    calls = Call(write, 1, "ROWS", rows, TINY), Call(fill, geometry.num_kv_heads, "SEQS", groups)
    return Lowering(calls, 0, alias_of=node.inputs[0])


def settle(geometry: KvGeometry, limits: Limits, layer: int) -> Call:
    """The launch that takes a step's committed rows into the rings, after attention."""
    assert geometry.wide is not None
    kernel = spec("settle_kv", K.SettleKv(geometry, limits, geometry.layer_format(layer)), "WIDE: pool", "CHUNK: bf16", "TAIL: i32",
                  "POS: i32", "SEQ: i32", "SLOT: i32", "CTX: i32", "ROWS: i32")
    inputs = ("tail_table", "positions", "row_seq", "row_slot", "seq_ctx", "seq_rows")
    return Call(kernel, 1, "ROWS", (PoolArg(geometry.wide.k_offset(layer, 0)), TempRef("chunk"), *map(InputArg, inputs)), TINY)


@lowers(ops_kv.PagedAttention)
def lower_attention(target: CpuTarget, node: Node, op: ops_kv.PagedAttention, graph: Graph) -> Lowering:
    geometry = kv_geometry(graph)
    assert geometry is not None
    kv = geometry.layer_format(op.layer)
    heads, dim = whole(input_type(graph, node, 0))
    attend = K.Attend(geometry, target.limits, kv, heads, op.scale, op.window, op.softcap, op.sinks, op.coarse)
    combine = K.AttendCombine(geometry, target.limits, kv, heads, 1.0 if op.softcap else op.scale, op.quantise)
    more_abi: tuple[str, ...] = ()
    more: tuple[CallArg, ...] = ()
    kept: tuple[TempRef, ...] = (TempRef("kept"),) if attend.reads_q else ()
    if geometry.wide is not None:
        more_abi = "WIDE: pool", "CHUNK: bf16", "TAIL: i32", "ROW: i32"
        more = PoolArg(geometry.wide.k_offset(op.layer, 0)), TempRef("chunk"), InputArg("tail_table"), InputArg("seq_row")
    abi = ("Q: f32", *(["KEPT: i32"] if kept else []), "POOL: pool", *more_abi, "POS: i32", "SLOT: i32", "ANC: u64", "CTX: i32",
           "PAGES: i32", "SCRATCH: i32", "WORK: i32", "PART: f32")
    first = Call(
        spec("attend", attend, *abi), geometry.num_kv_heads, "WORK",
        (ValueRef(node.inputs[0]), *kept, PoolArg(geometry.k_offset(op.layer, 0)), *more,
         *(InputArg(i) for i in ("positions", "row_slot", "ancestors", "seq_ctx", "page_table", "scratch_table")),
         TempRef("work"), TempRef("parts")))
    rows = attend.rows_padded
    result: tuple[CallArg, ...] = (ValueRef(node.name),)
    temps = {"parts": rows * heads * attend.spans * (dim + 16) * 4}
    if op.quantise:
        result = (TempRef("out"), *a8_args(node.name, rows, heads * dim))
        temps["out"] = rows * heads * dim * 4
    second = Call(spec("attend_combine", combine, "PART: f32", "POS: i32", "Y: f32", *(A8_OUT if op.quantise else ()), "H: i32"), 1, "ROWS",
                  (TempRef("parts"), InputArg("positions"), *result, HEADER), TILE)
    calls = (first, second) if geometry.wide is None else (first, second, settle(geometry, target.limits, op.layer))
    if kept:
        temps["kept"] = rows * heads * attend.kept_words * 4
        prepare = spec("prepare_q", K.PrepareQ(geometry, target.limits, kv, heads), "Q: f32", "KEPT: i32")
        calls = Call(prepare, geometry.num_kv_heads, "ROWS", (ValueRef(node.inputs[0]), *kept)), *calls
    return Lowering(calls, storage(node.type), temps)
