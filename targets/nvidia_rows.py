"""Lowerings of row-wise ops on NVIDIA GPUs: embedding, norms, linears, the gated MLP, RoPE tables, the rows that want logits, argmax.

A program takes `Launch.grain` of the counted rows: a launch has `grid * ceil(count / grain)` of them, program p the columns `p % grid`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, TypeVar

from mlsdc.compiler import ops_core, ops_nn, ops_quant
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.types import DType, TensorType
from mlsdc.runtime.program import InputArg
from mlsdc.targets.hardware import Gpu
from mlsdc.targets.nvidia import NvidiaTarget, a8_bytes, columns_of, lowers, storage
from mlsdc.targets.nvidia_tma import by_tma
from mlsdc.targets.protocol import Call, CallArg, Declined, KernelSpec, Lowering, TempRef, ValueRef
from mlsdc.targets.values import counted_rows, fine_args, fine_of, input_type, is_rows, values, whole
from mlsdc.templates import params_triton_rows as P

HEADER = InputArg("header")
BITS = {DType.Q8: 8, DType.Q4: 4}
PLAIN = {DType.F32: "f32", DType.BF16: "bf16"}
LINEAR = {**PLAIN, DType.F8: "u8"}
MOST_ELEMENTS = 2**31  # kernels count in i32
FEW = 64  # rows that tiles for decoding take; a power of two
MOST_ROW = 16384  # columns that one program holds at a time

T = TypeVar("T", bound=P.LinearQ | P.Linear)


def launch(node: Node, params: Any, abi: tuple[str, ...], args: tuple[CallArg, ...], *, grid: int = 1, grain: int = 1,
           in_place_of: str | None = None) -> Lowering:
    """One launch over the node's rows; the last argument is the result."""
    call = Call(KernelSpec(params.template, params, abi), grid, counted_rows(node.type)[1], (*args, ValueRef(node.name)), grain)
    return Lowering((call,), storage(node.type), in_place_of=in_place_of)


def by_rows(node: Node, target: NvidiaTarget, params: P.LinearQ | P.Linear, abi: tuple[str, ...], args: tuple[CallArg, ...],
            in_place_of: str | None = None) -> Lowering:
    """A linear as two launches, of which one runs: tiles for decoding, and where there can be more than FEW rows tiles for prompts.

    Integer dots have the same bits in any tile. Those of floats need not: exact rows (law L2) keep to one kind of tile.
    """
    few = launch(node, params, abi, args, grid=params.grid, grain=params.block_m, in_place_of=in_place_of)
    if params.max_rows <= FEW or not target.gpu.multiprocessors or (target.exact and not exact_dots(params)):
        return few
    many = wide_tiles(params, target.gpu)
    if target.tma and (mapped := by_tma(many, target.gpu, abi, args)) is not None:
        many, abi, args = mapped
    more = launch(node, many, abi, args, grid=many.grid, grain=many.block_m)
    return replace(few, calls=(replace(few.calls[0], upto=FEW), replace(more.calls[0], over=FEW)))


def exact_dots(params: P.LinearQ | P.Linear) -> bool:
    return isinstance(params, P.LinearQ) and not isinstance(params, P.LinearA16)


def wide_tiles(params: T, gpu: Gpu) -> T:
    """The same linear for many rows; a gated one has two sums a column, and where it quantises takes whole tiles of its columns. On sm_100
    integer dots of 128 columns spill, of 32 they don't."""
    gated, most = isinstance(params, P.GatedQ | P.Gated | P.GatedA16), 32 if gpu.sm == 100 else 128
    if isinstance(params, P.GatedA16) or (isinstance(params, P.Gated) and gpu.sm != 90):
        most = 32  # 64 leave no registers for what is on its way
    fitting = (size for size in (64, 32) if size <= most and (not isinstance(params, P.GatedQ) or params.n % size == 0))
    columns = next(fitting) if gated else most
    return replace(params, block_m=64, block_n=columns, most_programs=2 * gpu.multiprocessors)


def rows(node: Node) -> tuple[int, int]:
    """(header word, rows at most): what every RowParams begins with."""
    word, _, most = counted_rows(node.type)
    return word, most


def fine_abi(fine: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"fine{i}: i32" for i in range(len(fine)))


@lowers(ops_nn.Embed)
def lower_embed(target: NvidiaTarget, node: Node, op: ops_nn.Embed, graph: Graph) -> Lowering | Declined:
    table = input_type(graph, node, 1)
    n, k = whole(table)
    if k > MOST_ROW:
        return Declined(f"rows of {k} columns; a program holds {MOST_ROW}")
    tokens, weight = values(node)
    if table.dtype in BITS:
        packed = P.EmbedQ(*rows(node), n, k, BITS[table.dtype], op.scale)
        return launch(node, packed, ("tokens: *i32", "w_ptr: *u8", "header: *i32", "y_ptr: *f32"), (tokens, weight, HEADER))
    if table.dtype not in PLAIN:
        return Declined(f"embedding table of {table.dtype}; there are templates for q8, q4, bf16 and f32")
    params = P.Embed(*rows(node), n, k, op.scale)
    return launch(node, params, ("tokens: *i32", f"w_ptr: *{PLAIN[table.dtype]}", "header: *i32", "y_ptr: *f32"), (tokens, weight, HEADER))


@lowers(ops_nn.RopeTable)
def lower_rope_table(target: NvidiaTarget, node: Node, op: ops_nn.RopeTable, graph: Graph) -> Lowering:
    (half,) = whole(input_type(graph, node, 1))
    abi = ("positions: *i32", "freq_ptr: *f32", "header: *i32", "y_ptr: *f32")
    return launch(node, P.RopeTable(*rows(node), half, op.scaling), abi, (*values(node), HEADER))


@lowers(ops_nn.RmsNorm)
def lower_rms_norm(target: NvidiaTarget, node: Node, op: ops_nn.RmsNorm, graph: Graph) -> Lowering | Declined:
    if not is_rows(node.type):
        return Declined(f"rms_norm of {node.type}")
    *heads, k = whole(input_type(graph, node, 0))
    if k > MOST_ROW:
        return Declined(f"vectors of {k}; a program holds {MOST_ROW}")
    params = P.RmsNorm(*rows(node), prod(heads), k, op.eps, op.offset)
    abi = ("x_ptr: *f32", "weight_ptr: *f32", "header: *i32", "y_ptr: *f32")
    return launch(node, params, abi, (*values(node), HEADER), grid=params.heads)


@lowers(ops_quant.Quantise)
def lower_quantise(target: NvidiaTarget, node: Node, op: ops_quant.Quantise, graph: Graph) -> Lowering | Declined:
    return quantise(node, P.Quantise(*rows(node), columns_of(node.type), fine=len(op.fine)), op.fine)


@lowers(ops_quant.NormQuantise)
def lower_norm_quantise(target: NvidiaTarget, node: Node, op: ops_quant.NormQuantise, graph: Graph) -> Lowering | Declined:
    return quantise(node, P.Quantise(*rows(node), columns_of(node.type), True, op.eps, op.offset, len(op.fine)), op.fine)


def quantise(node: Node, params: P.Quantise, fine: tuple[int, ...]) -> Lowering | Declined:
    if params.k > MOST_ROW:
        return Declined(f"rows of {params.k} columns; a program holds {MOST_ROW}")
    abi = ("x_ptr: *f32", *(("weight_ptr: *f32",) if params.norm else ()), "header: *i32", *fine_abi(fine), "y_ptr: *i8")
    lowering = launch(node, params, abi, (*values(node), HEADER, *fine_args(fine)))
    return Lowering(lowering.calls, a8_bytes(params.max_rows, params.columns))


@lowers(ops_quant.LinearQ)
def lower_linear_q(target: NvidiaTarget, node: Node, op: ops_quant.LinearQ, graph: Graph) -> Lowering | Declined:
    weight = input_type(graph, node, 1)
    n, k = whole(weight)
    if why := unfit(weight, node):
        return Declined(why)
    fine = fine_of(graph, node.inputs[0])
    params = P.LinearQ(*rows(node), n, k, BITS[weight.dtype], len(fine), op.bias, op.residual)
    extra = (("bias_ptr: *f32",) if op.bias else ()) + (("residual_ptr: *f32",) if op.residual else ())
    abi = ("w_ptr: *u8", "x_ptr: *i8", *extra, "header: *i32", *fine_abi(fine), "y_ptr: *f32")
    h, w, *more = values(node)
    return by_rows(node, target, params, abi, (w, h, *more, HEADER, *fine_args(fine)), node.inputs[-1] if op.residual else None)


@lowers(ops_quant.GatedQuantise)
def lower_gated(target: NvidiaTarget, node: Node, op: ops_quant.GatedQuantise, graph: Graph) -> Lowering | Declined:
    weight = input_type(graph, node, 1)
    n2, k = whole(weight)
    if why := unfit(weight, node):
        return Declined(why)
    fine = fine_of(graph, node.inputs[0])
    params = P.GatedQ(*rows(node), n2 // 2, k, BITS[weight.dtype], len(fine), act=op.act)
    abi = ("w_ptr: *u8", "x_ptr: *i8", "header: *i32", *fine_abi(fine), "y_ptr: *i8")
    h, w = values(node)
    lowering = by_rows(node, target, params, abi, (w, h, HEADER, *fine_args(fine)))
    return Lowering(lowering.calls, a8_bytes(params.max_rows, params.n))


def unfit(weight: TensorType, node: Node) -> str | None:
    """Why a packed weight has no template."""
    n, k = whole(weight)
    if weight.dtype not in BITS:
        return f"weight of {weight.dtype}; there are templates for q8 and q4"
    return too_large(n, k, node)


def too_large(n: int, k: int, node: Node) -> str | None:
    """Why a linear with a weight [n, k] has no template: its elements, or those of its rows or results, are too many."""
    most = rows(node)[1]
    if max(n * k, most * n, most * k) >= MOST_ELEMENTS:
        return f"weight of {n} x {k} for {most} rows: kernels count elements in 31 bits"
    return None


@lowers(ops_nn.Linear)
def lower_linear(target: NvidiaTarget, node: Node, op: ops_nn.Linear, graph: Graph) -> Lowering | Declined:
    x, weight = input_type(graph, node, 0), input_type(graph, node, 1)
    if weight.dtype not in (*LINEAR, *BITS) or not is_rows(x) or x.rank != 2:
        return Declined(f"linear of {x} and {weight}; there are templates for f32[rows, k] and weights of f32, bf16, f8, q8 and q4")
    n, k = whole(weight)
    if why := too_large(n, k, node):
        return Declined(why)
    bias = len(node.inputs) == 3
    params: P.Linear | P.LinearA16
    if weight.dtype in BITS:
        params, stored = P.LinearA16(*rows(node), n, k, BITS[weight.dtype], bias=bias), "u8"
    else:
        params, stored = P.Linear(*rows(node), n, k, LINEAR[weight.dtype], bias), LINEAR[weight.dtype]
    abi = ("x_ptr: *f32", f"w_ptr: *{stored}", *(("bias_ptr: *f32",) if bias else ()), "header: *i32", "y_ptr: *f32")
    return by_rows(node, target, params, abi, (*values(node), HEADER))


@lowers(ops_nn.Gated)
def lower_gated_plain(target: NvidiaTarget, node: Node, op: ops_nn.Gated, graph: Graph) -> Lowering | Declined:
    weight = input_type(graph, node, 1)
    n2, k = whole(weight)
    if weight.dtype not in (DType.BF16, DType.F8, *BITS):
        return Declined(f"gated with a weight of {weight.dtype}; there are templates for bf16, f8, q8 and q4")
    if why := too_large(n2, k, node):
        return Declined(why)
    params: P.Gated | P.GatedA16
    if weight.dtype in BITS:
        params, stored = P.GatedA16(*rows(node), n2 // 2, k, BITS[weight.dtype], act=op.act), "u8"
    else:
        params, stored = P.Gated(*rows(node), n2 // 2, k, LINEAR[weight.dtype], act=op.act), LINEAR[weight.dtype]
    return by_rows(node, target, params, ("x_ptr: *f32", f"w_ptr: *{stored}", "header: *i32", "y_ptr: *f32"), (*values(node), HEADER))


@lowers(ops_core.GatherRows)
def lower_gather(target: NvidiaTarget, node: Node, op: ops_core.GatherRows, graph: Graph) -> Lowering | Declined:
    k = columns_of(input_type(graph, node, 0))
    if k > MOST_ROW or not is_rows(node.type):
        return Declined(f"gather_rows of {input_type(graph, node, 0)}; a program holds {MOST_ROW} columns of f32")
    params = P.GatherRows(*rows(node), k)
    return launch(node, params, ("x_ptr: *f32", "index: *i32", "header: *i32", "y_ptr: *f32"), (*values(node), HEADER))


@lowers(ops_core.ArgMax)
def lower_argmax(target: NvidiaTarget, node: Node, op: ops_core.ArgMax, graph: Graph) -> Lowering | Declined:
    if not is_rows(input_type(graph, node, 0)):
        return Declined(f"argmax of {input_type(graph, node, 0)}")
    word, count, most = counted_rows(node.type)
    n = columns_of(input_type(graph, node, 0))
    part, join = (kind(word, most, n, op.limit or n) for kind in (P.ArgMax, P.ArgMaxJoin))
    value, index = TempRef("values"), TempRef("indices")
    first = Call(KernelSpec(part.template, part, ("x_ptr: *f32", "header: *i32", "value_ptr: *f32", "index_ptr: *i32")), part.parts, count,
                 (ValueRef(node.inputs[0]), HEADER, value, index))
    second = Call(KernelSpec(join.template, join, ("value_ptr: *f32", "index_ptr: *i32", "header: *i32", "y_ptr: *i32")), 1, count,
                  (value, index, HEADER, ValueRef(node.name)))
    size = 4 * most * part.parts
    return Lowering((first, second), storage(node.type), {"values": size, "indices": size})


@lowers(ops_quant.Calibrated)
def lower_calibrated(target: NvidiaTarget, node: Node, op: ops_quant.Calibrated, graph: Graph) -> Lowering:
    return Lowering((), 0, alias_of=node.inputs[0])


@lowers(ops_core.Reshape)
def lower_reshape(target: NvidiaTarget, node: Node, op: ops_core.Reshape, graph: Graph) -> Lowering:
    return Lowering((), 0, alias_of=node.inputs[0])
