"""Quantised ops of the reference interpreter: the definitions of `quantise` in numpy, the rest in torch."""

from __future__ import annotations

from typing import Any

import torch

from mlsdc.compiler import ops_quant
from mlsdc.compiler.interpret_core import UNARY, Context, Tensor, Value, evaluates, normalised, rotated
from mlsdc.compiler.interpret_state import KvState, StepTree
from mlsdc.compiler.quantise import A8, A16, F8, Q4, Q8, linear_q, quantise_a8, quantise_a16, quantise_f8
from mlsdc.runtime.kv_numbers import from_e4m3


def quantised(x: Tensor, fine: tuple[int, ...] = ()) -> A8 | A16:
    plain = x.to(torch.float32).numpy()
    return quantise_a16(plain, fine) if fine else quantise_a8(plain)


def multiplied(h: A8 | A16, weight: Q8 | Q4, context: Context) -> Tensor:
    return torch.from_numpy(linear_q(h, weight)).to(context.real)


@evaluates(ops_quant.Quantise)
def quantise(op: ops_quant.Quantise, inputs: tuple[Any, ...], context: Context) -> Value:
    return quantised(inputs[0], op.fine)


@evaluates(ops_quant.Calibrated)
def calibrated(op: ops_quant.Calibrated, inputs: tuple[Any, ...], context: Context) -> Value:
    return inputs[0]  # type: ignore[no-any-return]


@evaluates(ops_quant.LinearQ)
def linear_q_(op: ops_quant.LinearQ, inputs: tuple[Any, ...], context: Context) -> Value:
    out = multiplied(inputs[0], inputs[1], context)
    for term in inputs[2:]:  # bias, then residual
        out = out + term.to(context.real)
    return out


def multiplied_f8(x: Tensor, weight: F8, context: Context) -> Tensor:
    """Products of e4m3 numbers are exact in f32; scales come last."""
    rows = quantise_f8(x.to(torch.float32).numpy())
    a, b = (torch.from_numpy(from_e4m3(each.codes)).to(context.real) for each in (rows, weight))
    scales = [torch.from_numpy(each.scales).to(context.real) for each in (rows, weight)]
    return a @ b.T * scales[0][:, None] * scales[1]


@evaluates(ops_quant.LinearF8)
def linear_f8(op: ops_quant.LinearF8, inputs: tuple[Any, ...], context: Context) -> Value:
    out = multiplied_f8(inputs[0], inputs[1], context)
    for term in inputs[2:]:  # bias, then residual
        out = out + term.to(context.real)
    return out


@evaluates(ops_quant.GatedF8)
def gated_f8(op: ops_quant.GatedF8, inputs: tuple[Any, ...], context: Context) -> Value:
    gate, up = multiplied_f8(inputs[0], inputs[1], context).chunk(2, dim=-1)
    return UNARY[op.act](gate) * up


@evaluates(ops_quant.NormQuantise)
def norm_quantise(op: ops_quant.NormQuantise, inputs: tuple[Any, ...], context: Context) -> Value:
    return quantised(normalised(inputs[0], inputs[1], op.eps, op.offset), op.fine)


@evaluates(ops_quant.GatedQuantise)
def gated_quantise(op: ops_quant.GatedQuantise, inputs: tuple[Any, ...], context: Context) -> Value:
    gate, up = multiplied(inputs[0], inputs[1], context).chunk(2, dim=-1)
    return quantised(UNARY[op.act](gate) * up)


@evaluates(ops_quant.RopeSlice)
def rope_slice(op: ops_quant.RopeSlice, inputs: tuple[Any, ...], context: Context) -> Value:
    x, table = inputs
    return rotated(heads(x, op.start, op.heads, op.head_dim), table)


@evaluates(ops_quant.AppendKvSlice)
def append_kv_slice(op: ops_quant.AppendKvSlice, inputs: tuple[Any, ...], context: Context) -> Value:
    kv, x, table, tree = inputs
    shape = kv.geometry.num_kv_heads, kv.geometry.head_dim
    k, v = rotated(heads(x, op.k_start, *shape), table), heads(x, op.v_start, *shape)
    return appended(kv, op.layer, tree, k, v)


def appended(kv: KvState, layer: int, tree: StepTree, k: Tensor, v: Tensor) -> KvState:
    return kv.append(layer, tree, k.to(torch.float32).numpy(), v.to(torch.float32).numpy())


def heads(x: Tensor, start: int, count: int, head_dim: int) -> Tensor:
    """Columns start.. of x[rows, n] as [rows, count, head_dim]."""
    return x[:, start : start + count * head_dim].reshape(x.shape[0], count, head_dim)
