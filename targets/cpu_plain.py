"""Lowerings of unfused ops on the CPU, so that any subset of the fusion passes may be left out, and f32 weights multiply as they are.

Values by position (scores, gathered keys) are laid out at the artifact's limits, which takes memory that fused attention does not need:
a layer that would take more than MOST_BYTES is declined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

from mlsdc.compiler import ops_core, ops_kv, ops_nn, ops_shard
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.ops import Op
from mlsdc.compiler.types import Dim, DType, TensorType, Type
from mlsdc.runtime.program import InputArg, IntArg, PoolArg
from mlsdc.targets.cpu import HEADER, CpuTarget, kv_geometry, lower_embed, lowers, rows_of, spec, storage
from mlsdc.targets.elementwise import OPS, classified
from mlsdc.targets.protocol import Call, CallArg, Declined, KernelSpec, Lowering, TempRef, ValueRef
from mlsdc.targets.values import input_type, is_rows, values, whole
from mlsdc.templates import params_kv as K
from mlsdc.templates import params_plain as P
from mlsdc.templates.params import padded

MOST_BYTES = 4 << 30
POSITIONS = InputArg("positions")
BOTH, ACTIVE = TempRef("both"), TempRef("active")


def launch(node: Node, kernel: KernelSpec, tasks: int, *args: CallArg) -> Lowering:
    """One launch of `tasks` tasks a row, whose last argument is the result."""
    assert isinstance(node.type, TensorType)
    *outer, last = node.type.shape
    laid_out = node.type.with_shape(*outer, padded(last.hi, P.LANES)) if isinstance(last, Dim) else node.type  # ctx: whole vectors
    return Lowering((Call(kernel, tasks, rows_of(node.type)[1], (*args, ValueRef(node.name))),), storage(laid_out))


# elementwise ops and copies


def lower_elementwise(target: CpuTarget, node: Node, op: Op, graph: Graph) -> Lowering | Declined:
    found = classified(node, graph)
    if isinstance(found, Declined):
        return found
    rows = rows_of(node.type)[2]
    operands = []
    for operand in found.operands:
        size = prod((rows if isinstance(n, Dim) else n for n in operand.type.shape), start=1)
        operands.append(P.Operand(size, operand.strides, operand.start))
    kernel = P.Elementwise(found.fn, rows, found.dims, tuple(operands), found.value)
    names = ("A: f32", "B: f32")[: len(operands)]
    return launch(node, spec("elementwise", kernel, *names, "Y: f32"), 1, *values(node))


for elementwise in OPS:
    lowers(elementwise)(lower_elementwise)


# row-wise ops


@lowers(ops_nn.Embed)
def lower_embed_plain(target: CpuTarget, node: Node, op: ops_nn.Embed, graph: Graph) -> Lowering | Declined:
    table = input_type(graph, node, 1)
    if table.dtype.packed:
        return lower_embed(target, node, op, graph)
    n, k = whole(table)
    rows = rows_of(node.type)[2]
    kernel = spec("embed_f32", P.EmbedF32(rows, n, k, op.scale), "W: f32", "TOK: i32", "Y: f32")
    if table.dtype is DType.BF16:
        kernel = spec("embed_bf16", P.EmbedBf16(rows, n, k, op.scale), "W: bf16", "TOK: i32", "Y: f32")
    return launch(node, kernel, 1, ValueRef(node.inputs[1]), ValueRef(node.inputs[0]))


@lowers(ops_nn.Linear)
def lower_linear(target: CpuTarget, node: Node, op: ops_nn.Linear, graph: Graph) -> Lowering | Declined:
    x, weight = input_type(graph, node, 0), input_type(graph, node, 1)
    if (weight.dtype.packed and weight.dtype is not DType.F8) or not is_rows(x) or x.rank != 2:
        return Declined(f"linear of {x} and {weight}; the CPU has it for f32[rows, k] and weights of f32, bf16 or f8")
    return Lowering((linear_call(node, weight, values(node), ValueRef(node.name)),), storage(node.type))


def linear_call(node: Node, weight: TensorType, args: Sequence[CallArg], result: CallArg) -> Call:
    """The node's rows by a weight of f32, bf16 or f8: `args` are the rows, the weight and maybe a bias."""
    index, _, rows = rows_of(node.type)
    n, k = whole(weight)
    x, w, *rest = args
    abi = ("X: f32", f"W: {weight.dtype}", *(("B: f32",) if rest else ()), "Y: f32", "H: i32")
    if weight.dtype is DType.F8:
        kernel = spec("linear_f8", P.LinearF8(index, rows, n, k, bool(rest)), abi[0], abi[1], "S: f32", *abi[2:])
        return Call(kernel, -(-n // 16), None, (x, w, w, *rest, result, HEADER))
    if weight.dtype is DType.BF16:
        kernel, block = spec("linear_bf16", P.LinearBf16(index, rows, n, k, bool(rest)), *abi), 16
    else:
        plain = P.LinearF32(index, rows, n, k, bool(rest))
        kernel, block = spec("linear_f32", plain, *abi), plain.block
    return Call(kernel, -(-n // block), None, (x, w, *rest, result, HEADER))


@lowers(ops_nn.Gated)
def lower_gated(target: CpuTarget, node: Node, op: ops_nn.Gated, graph: Graph) -> Lowering | Declined:
    """Both halves by one linear, then the activation, then the product."""
    weight = input_type(graph, node, 1)
    if weight.dtype not in (DType.F8, DType.BF16):
        return Declined(f"gated with a weight of {weight.dtype}; the CPU has it for bf16 and f8")
    return gated(node, op.act, (linear_call(node, weight, values(node), BOTH),))


def gated(node: Node, act: str, calls: Sequence[Call], temps: Mapping[str, int] = MappingProxyType({})) -> Lowering:
    """What `calls` leave in BOTH, gate's columns and up's, then the activation, then the product."""
    assert isinstance(node.type, TensorType)
    _, count, rows = rows_of(node.type)
    (n,) = whole(node.type)
    size, halves = rows * n, (2 * n, 1)
    gate, up, active = P.Operand(2 * size, halves), P.Operand(2 * size, halves, n), P.Operand(size, (n, 1))
    first = spec("elementwise", P.Elementwise(act, rows, (n,), (gate,)), "A: f32", "Y: f32")
    second = spec("elementwise", P.Elementwise("mul", rows, (n,), (active, up)), "A: f32", "B: f32", "Y: f32")
    more = (Call(first, 1, count, (BOTH, ACTIVE)), Call(second, 1, count, (ACTIVE, BOTH, ValueRef(node.name))))
    return Lowering((*calls, *more), storage(node.type), {**temps, BOTH.temp: 8 * size, ACTIVE.temp: 4 * size})


@lowers(ops_shard.AllReduce)
def lower_all_reduce(target: CpuTarget, node: Node, op: ops_shard.AllReduce, graph: Graph) -> Lowering:
    """The runtime stops before this launch, and lays all ranks' parts (of x, the first argument) into the second."""
    _, count, rows = rows_of(node.type)
    (n,) = whole(node_tensor(node))
    kernel = spec("sum_ranks", P.SumRanks(rows, n, op.ranks), "X: f32", "P: f32", "Y: f32", "ROW: int", "PART: int")
    call = Call(kernel, 1, count, (*values(node), TempRef("parts"), ValueRef(node.name), IntArg(n * 4), IntArg(rows * n * 4)))
    return Lowering((call,), storage(node.type), {"parts": op.ranks * rows * n * 4})


@lowers(ops_nn.RmsNorm)
def lower_rms_norm(target: CpuTarget, node: Node, op: ops_nn.RmsNorm, graph: Graph) -> Lowering | Declined:
    if not is_rows(node.type):
        return Declined(f"rms_norm of {node.type}")
    *heads, k = whole(input_type(graph, node, 0))
    params = P.RmsNorm(rows_of(node.type)[2], prod(heads), k, op.eps, op.offset)
    return launch(node, spec("rms_norm", params, "X: f32", "G: f32", "Y: f32"), params.heads, *values(node))


@lowers(ops_nn.PadHeads)
def lower_pad_heads(target: CpuTarget, node: Node, op: ops_nn.PadHeads, graph: Graph) -> Lowering | Declined:
    x = input_type(graph, node, 0)
    if not is_rows(x):
        return Declined(f"pad_heads of {x}")
    own, dim = whole(x)
    params = P.PadHeads(rows_of(x)[2], own * dim, op.heads * dim)
    return launch(node, spec("pad_heads", params, "X: f32", "Y: f32"), 1, *values(node))


@lowers(ops_core.Softmax)
def lower_softmax(target: CpuTarget, node: Node, op: ops_core.Softmax, graph: Graph) -> Lowering | Declined:
    x = input_type(graph, node, 0)
    by_position = isinstance(x.shape[-1], Dim) and x.shape[-1].name == "ctx"
    *heads, n = x.shape[1:]
    if not (by_position or is_rows(x)) or not all(isinstance(size, int) for size in heads):
        return Declined(f"softmax of {x}")
    tasks = prod(size for size in heads if isinstance(size, int))
    params = P.Softmax(rows_of(x)[2], tasks, n.hi if isinstance(n, Dim) else n, by_position)
    abi = ("X: f32", *(("POS: i32",) if by_position else ()), "Y: f32")
    return launch(node, spec("softmax", params, *abi), tasks, *values(node), *((POSITIONS,) if by_position else ()))


# attention, op by op


@lowers(ops_kv.ReadKv)
def lower_read_kv(target: CpuTarget, node: Node, op: ops_kv.ReadKv, graph: Graph) -> Lowering | Declined:
    geometry = kv_geometry(graph)
    if geometry is None or geometry.layer_format(op.layer).name != "bf16":
        return Declined(f"read_kv of {graph[node.inputs[0]].type}; the CPU reads bf16 one position at a time: enable fuse-attention")
    ctx = context(node.type)
    stored = storage(node.type)
    if 6 * stored > MOST_BYTES:  # keys and values, each as stored and in f32
        limits = target.limits
        return Declined(
            f"unfused attention would hold {6 * stored / 2**30:.1f} GiB of keys and values (limits.max_num_batched_tokens "
            f"{limits.max_num_batched_tokens} x limits.max_model_len {limits.max_model_len}), at most {MOST_BYTES >> 30} GiB is allowed: "
            "lower these limits or enable fuse-attention")
    params = K.ReadKv(geometry, target.limits, geometry.layer_format(op.layer), op.which, ctx)
    inputs = {"POS": "positions", "SEQ": "row_seq", "SLOT": "row_slot", "ANC": "ancestors", "CTX": "seq_ctx", "PAGES": "page_table",
              "SCRATCH": "scratch_table"}
    abi = [f"{name}: {'u64' if name == 'ANC' else 'i32'}" for name in inputs]
    kernel = spec("read_kv_bf16", params, "POOL: pool", *abi, "Y: bf16")
    return launch(node, kernel, geometry.num_kv_heads, PoolArg(geometry.k_offset(op.layer, 0)), *map(InputArg, inputs.values()))


def context(type_: Type) -> int:
    """The longest context of a value by position."""
    assert isinstance(type_, TensorType)
    return next(size.hi for size in type_.shape[1:] if isinstance(size, Dim))


@lowers(ops_kv.Dequantise)
def lower_dequantise(target: CpuTarget, node: Node, op: ops_kv.Dequantise, graph: Graph) -> Lowering | Declined:
    x = input_type(graph, node, 0)
    if x.dtype is not DType.BF16:
        return Declined(f"dequantise of {x}")
    kv_heads, dim = whole(x)
    params = P.Dequantise(rows_of(x)[2], context(x), kv_heads, dim)
    return launch(node, spec(params.stem, params, "X: bf16", "POS: i32", "Y: f32"), kv_heads, *values(node), POSITIONS)


@lowers(ops_kv.MatMulQK)
def lower_matmul_qk(target: CpuTarget, node: Node, op: ops_kv.MatMulQK, graph: Graph) -> Lowering:
    k = input_type(graph, node, 1)
    (heads,), (kv_heads, dim) = whole(node_tensor(node)), whole(k)
    params = P.MatMulQK(rows_of(k)[2], context(k), heads, kv_heads, dim, op.scale, op.softcap)
    return launch(node, spec("matmul_qk", params, "Q: f32", "K: f32", "POS: i32", "Y: f32"), heads, *values(node), POSITIONS)


@lowers(ops_kv.TreeMask)
def lower_tree_mask(target: CpuTarget, node: Node, op: ops_kv.TreeMask, graph: Graph) -> Lowering:
    params = P.TreeMask(rows_of(node.type)[2], context(node.type), op.window, op.sinks)
    return launch(node, spec("tree_mask", params, "POS: i32", "Y: bool"), 1, POSITIONS)


@lowers(ops_kv.Mask)
def lower_mask(target: CpuTarget, node: Node, op: ops_kv.Mask, graph: Graph) -> Lowering:
    (heads,) = whole(node_tensor(node))
    params = P.Mask(rows_of(node.type)[2], context(node.type), heads)
    return launch(node, spec("mask", params, "X: f32", "M: bool", "POS: i32", "Y: f32"), heads, *values(node), POSITIONS)


@lowers(ops_kv.MatMulPV)
def lower_matmul_pv(target: CpuTarget, node: Node, op: ops_kv.MatMulPV, graph: Graph) -> Lowering:
    v = input_type(graph, node, 1)
    (heads, dim), (kv_heads, _) = whole(node_tensor(node)), whole(v)
    params = P.MatMulPV(rows_of(v)[2], context(v), heads, kv_heads, dim)
    return launch(node, spec("matmul_pv", params, "P: f32", "V: f32", "POS: i32", "Y: f32"), heads, *values(node), POSITIONS)


def node_tensor(node: Node) -> TensorType:
    assert isinstance(node.type, TensorType)
    return node.type
