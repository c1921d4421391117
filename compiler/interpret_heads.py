"""Ops of drafting levels in the reference interpreter."""

from __future__ import annotations

from typing import Any

import torch

from mlsdc.compiler import ops_heads
from mlsdc.compiler.interpret_core import Context, Value, evaluates


@evaluates(ops_heads.TopK)
def top_k(op: ops_heads.TopK, inputs: tuple[Any, ...], context: Context) -> Value:
    x = inputs[0]
    order = torch.argsort(x, dim=-1, descending=True, stable=True)[:, : op.k]  # stable: of equal values the lowest index
    less = x - x.max(-1, keepdim=True).values
    return torch.cat([less.gather(-1, order), order.to(x.dtype), less.exp().sum(-1, keepdim=True)], -1)
