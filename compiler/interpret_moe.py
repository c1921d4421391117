"""Ops of mixtures of experts in the reference interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mlsdc.compiler import ops_moe
from mlsdc.compiler.interpret_core import Context, Tensor, Value, evaluates, real
from mlsdc.compiler.quantise import A8, A16, linear_q
from mlsdc.compiler.types import GROUP


@evaluates(ops_moe.TopIndex)
def top_index(op: ops_moe.TopIndex, inputs: tuple[Tensor, ...], context: Context) -> Value:
    order = torch.sort(inputs[0], dim=-1, descending=True, stable=True).indices
    return order[..., : op.k].to(torch.int32)


@evaluates(ops_moe.Take)
def take(op: ops_moe.Take, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return inputs[0].gather(-1, inputs[1].long())


@evaluates(ops_moe.ExpertLinear)
def expert_linear(op: ops_moe.ExpertLinear, inputs: tuple[Any, ...], context: Context) -> Value:
    x, weight, index, *bias = inputs
    n = weight_rows(weight) // op.experts
    x = x.expand(-1, index.shape[1], -1)
    out = torch.zeros(*index.shape, n, dtype=context.real)
    for expert in index.unique().tolist():  # only the experts hit
        rows, part = index == expert, slice(expert * n, (expert + 1) * n)
        out[rows] = F.linear(x[rows], real(weight[part], context), bias[0][expert].to(context.real) if bias else None)
    return out


@evaluates(ops_moe.ExpertLinearQ)
def expert_linear_q(op: ops_moe.ExpertLinearQ, inputs: tuple[Any, ...], context: Context) -> Value:
    h, weight, index, *bias = inputs
    n, k = weight_rows(weight) // op.experts, weight.codes.shape[1]
    out = torch.zeros(*index.shape, n, dtype=context.real)
    for row, slot in np.ndindex(*index.shape):
        expert = int(index[row, slot])
        part = slice(expert * n, (expert + 1) * n)
        start = slot * k if op.inputs > 1 else 0
        found = torch.from_numpy(linear_q(columns(h, row, start, k), weight[part])[0]).to(context.real)
        out[row, slot] = found + bias[0][expert].to(context.real) if bias else found
    return out


def weight_rows(weight: Any) -> int:
    return int((weight.codes if hasattr(weight, "codes") else weight).shape[0])


def columns(h: A8 | A16, row: int, start: int, k: int) -> A8 | A16:
    """k columns of one row."""
    if isinstance(h, A16):
        high, low = (A8(plane.codes[row : row + 1], plane.scales[row : row + 1]) for plane in (h.high, h.low))
        return A16(high, low, h.fine)
    return A8(h.codes[row : row + 1, start : start + k], h.scales[row : row + 1, start // GROUP : (start + k) // GROUP])
