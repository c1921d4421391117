"""KV and tree ops of the reference interpreter, over real page bytes (`interpret_state`)."""

from __future__ import annotations

from typing import Any

import torch

from mlsdc.compiler import ops_kv
from mlsdc.compiler.interpret_core import TORCH, Context, Tensor, Value, capped, evaluates
from mlsdc.compiler.interpret_quant import appended, quantised
from mlsdc.compiler.interpret_state import StepTree


@evaluates(ops_kv.AppendKv)
def append_kv(op: ops_kv.AppendKv, inputs: tuple[Any, ...], context: Context) -> Value:
    kv, k, v, tree = inputs
    return appended(kv, op.layer, tree, k, v)


@evaluates(ops_kv.ReadKv)
def read_kv(op: ops_kv.ReadKv, inputs: tuple[Any, ...], context: Context) -> Value:
    kv, tree = inputs
    stored = torch.from_numpy(kv.read(op.layer, tree, coarse=op.coarse)[op.which == "values"])
    return stored.to(TORCH[ops_kv.stored_as(kv.geometry.format, op.layer)])  # exact: the bytes were of that type


@evaluates(ops_kv.Dequantise)
def dequantise(op: ops_kv.Dequantise, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return inputs[0].to(context.real)


@evaluates(ops_kv.MatMulQK)
def matmul_qk(op: ops_kv.MatMulQK, inputs: tuple[Tensor, ...], context: Context) -> Value:
    q, k = inputs
    return scores(q, k, op.scale, op.softcap)


def scores(q: Tensor, k: Tensor, scale: float, softcap: float) -> Tensor:
    """q[rows, heads, d], k[rows, kv_heads, ctx, d] -> [rows, heads, ctx]"""
    rows, heads, dim = q.shape
    split = q.reshape(rows, k.shape[1], heads // k.shape[1], dim)
    return capped(torch.einsum("rgqd,rgcd->rgqc", split, k).reshape(rows, heads, -1) * scale, softcap)


@evaluates(ops_kv.TreeMask)
def tree_mask(op: ops_kv.TreeMask, inputs: tuple[Any, ...], context: Context) -> Value:
    return seen(inputs[0], op.window, op.sinks)


def seen(tree: StepTree, window: int, sinks: int) -> Tensor:
    """bool[rows, ctx]: p - window < j <= p, or j < sinks"""
    positions = torch.arange(tree.ctx)
    distance = torch.from_numpy(tree.positions)[:, None] - positions
    return (distance >= 0) & (((distance < window) | (positions < sinks)) if window else True)


@evaluates(ops_kv.Mask)
def mask(op: ops_kv.Mask, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return inputs[0].masked_fill(~inputs[1][:, None], -torch.inf)


@evaluates(ops_kv.MatMulPV)
def matmul_pv(op: ops_kv.MatMulPV, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return weighted(inputs[0], inputs[1])


def weighted(p: Tensor, v: Tensor) -> Tensor:
    """p[rows, heads, ctx], v[rows, kv_heads, ctx, d] -> [rows, heads, d]"""
    rows, heads, ctx = p.shape
    split = p.reshape(rows, v.shape[1], heads // v.shape[1], ctx)
    return torch.einsum("rgqc,rgcd->rgqd", split, v).reshape(rows, heads, -1)


@evaluates(ops_kv.PagedAttention)
def paged_attention(op: ops_kv.PagedAttention, inputs: tuple[Any, ...], context: Context) -> Value:
    """By definition the unfused ops, one after the other."""
    q, kv, tree = inputs
    keys, values = (torch.from_numpy(x).to(context.real) for x in kv.read(op.layer, tree, coarse=op.coarse))
    masked = scores(q, keys, op.scale, op.softcap).masked_fill(~seen(tree, op.window, op.sinks)[:, None], -torch.inf)
    attended = weighted(torch.softmax(masked, dim=-1), values)
    return quantised(attended.reshape(attended.shape[0], -1)) if op.quantise else attended
