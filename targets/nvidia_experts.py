"""Lowerings of mixtures of experts on NVIDIA GPUs.

While there are at most as many pairs (row, slot) as experts (`pairs_alone`), a pair reads its expert's rows of the weight by itself. Beyond
that the pairs are sorted by expert first (`expert_plan`), and a tile of pairs of one expert reads them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeAlias

from mlsdc.compiler import ops_moe
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.ops_moe import pairs_alone
from mlsdc.targets.nvidia import NvidiaTarget, lowers, sizes, storage
from mlsdc.targets.nvidia_rows import BITS, HEADER, MOST_ELEMENTS, PLAIN, fine_abi, rows
from mlsdc.targets.protocol import Call, CallArg, Declined, KernelSpec, Lowering, TempRef, ValueRef
from mlsdc.targets.values import counted_rows, fine_args, fine_of, input_type, is_rows, values, whole
from mlsdc.templates import params_triton_experts as P
from mlsdc.templates.params_triton_levels import ExpertLinear, ExpertLinearQ

Tiles: TypeAlias = P.ExpertRows | P.ExpertTiles | P.ExpertTilesQ
FEW_OF_ONE = 16  # pairs of an expert, on average, up to which tiles have 16 rows


@lowers(ops_moe.ExpertLinear)
def lower_expert_linear(target: NvidiaTarget, node: Node, op: ops_moe.ExpertLinear, graph: Graph) -> Lowering | Declined:
    x, weight = input_type(graph, node, 0), input_type(graph, node, 1)
    if not is_rows(x) or weight.dtype not in PLAIN:
        return Declined(f"expert_linear of {x} and {weight}; there are templates for f32 rows and weights of f32 and bf16")
    (slots,), (given, k), n = whole(input_type(graph, node, 2)), whole(x), sizes(node.type)[2]
    if rows(node)[1] * slots * max(n, k) >= MOST_ELEMENTS:
        return Declined(f"{slots} slots of {n} x {k} for {rows(node)[1]} rows: kernels count elements in 31 bits")
    params = ExpertLinear(*rows(node), op.experts, slots, n, k, PLAIN[weight.dtype], given, len(node.inputs) == 4)
    abi = ("x_ptr: *f32", f"w_ptr: *{params.dtype}", "index_ptr: *i32", *(("bias_ptr: *f32",) if params.bias else ()), "header: *i32",
           "y_ptr: *f32")
    kinds: tuple[type[Tiles], ...] = (P.ExpertRows,) if target.exact else (P.ExpertTiles, P.ExpertTiles)
    return by_pairs(target, node, params, kinds, abi, (*values(node), HEADER, ValueRef(node.name)))


@lowers(ops_moe.ExpertLinearQ)
def lower_expert_linear_q(target: NvidiaTarget, node: Node, op: ops_moe.ExpertLinearQ, graph: Graph) -> Lowering | Declined:
    weight = input_type(graph, node, 1)
    if weight.dtype not in BITS:
        return Declined(f"weight of {weight.dtype}; there are templates for q8 and q4")
    (slots,), (n, k) = whole(input_type(graph, node, 2)), whole(weight)
    fine = fine_of(graph, node.inputs[0])
    if fine and op.inputs > 1:
        return Declined(f"second planes of {op.inputs} slots' rows have no template")
    if rows(node)[1] * slots * n >= MOST_ELEMENTS or n * k // 16 >= MOST_ELEMENTS:
        return Declined(f"weight of {n} x {k} for {rows(node)[1]} rows of {slots} slots: kernels count elements in 31 bits")
    params = ExpertLinearQ(*rows(node), n, k, BITS[weight.dtype], len(fine), op.bias, experts=op.experts, slots=slots, inputs=op.inputs)
    abi = ("w_ptr: *u8", "x_ptr: *i8", "index_ptr: *i32", *(("bias_ptr: *f32",) if op.bias else ()), "header: *i32", *fine_abi(fine),
           "y_ptr: *f32")
    h, w, *more = values(node)
    return by_pairs(target, node, params, (P.ExpertTilesQ, P.ExpertTilesQ), abi,
                    (w, h, *more, HEADER, *fine_args(fine), ValueRef(node.name)))


def by_pairs(target: NvidiaTarget, node: Node, params: ExpertLinear | ExpertLinearQ, kinds: Sequence[type[Tiles]], abi: tuple[str, ...],
             args: tuple[CallArg, ...]) -> Lowering:
    """A launch for few pairs, and where there can be more the plan and a launch over tiles; two of those, for few and for many pairs of an
    expert, if two kinds are given. They all have the same arguments, but that tiles read the plan instead of the index.

    Integer dots have the same bits in any tile, and `expert_rows` has those of a pair alone (law L2).
    """
    count, index = counted_rows(node.type)[1], 2
    alone = pairs_alone(params.experts, params.slots)
    few = Call(KernelSpec(params.template, params, abi), params.slots * params.grid, count, args)
    if params.max_rows <= alone or not target.gpu.multiprocessors:
        return Lowering((few,), storage(node.type))
    plan = P.ExpertPlan(*rows(node), params.experts, params.slots)
    sort = Call(KernelSpec(plan.template, plan, ("index_ptr: *i32", "header: *i32", "plan_ptr: *i32")), plan.experts, count,
                (args[index], HEADER, TempRef("plan")), params.max_rows, over=alone)
    tiled = (*abi[:index], "plan_ptr: *i32", *abi[index + 1 :])
    given = (*args[:index], TempRef("plan"), *args[index + 1 :])
    calls, over = [replace(few, upto=alone), sort], alone
    for kind, wide in zip(kinds, (False, True), strict=False):
        last = wide or len(kinds) == 1 or params.max_rows <= alone * FEW_OF_ONE
        upto = 0 if last else alone * FEW_OF_ONE
        tiles = tiles_of(kind, params, 2 * target.gpu.multiprocessors, wide, target.gpu.sm)
        calls.append(Call(KernelSpec(tiles.template, tiles, tiled), tiles.slots * tiles.grid, count, given, tiles.block_m, over, upto))
        over = upto
        if last:
            break
    return Lowering(tuple(calls), storage(node.type), {"plan": 4 * plan.size})


def tiles_of(kind: type[Tiles], params: ExpertLinear | ExpertLinearQ, programs: int, wide: bool, sm: int) -> Tiles:
    """The same linear by tiles, in programs that stay. 64 columns spill of f32 dots on sm_80, as do wide integer dots on sm_100."""
    narrow = getattr(params, "dtype", "") == "f32" or (sm == 100 and kind is P.ExpertTilesQ)
    shape = {"block_m": 64, "block_n": 32 if narrow else 64} if wide else {}
    same = {field.name: getattr(params, field.name) for field in fields(params)} | {"most_programs": programs} | shape
    return kind(**same)
