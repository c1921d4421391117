"""Ops of captured graphs in the reference interpreter."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mlsdc.compiler import ops_capture
from mlsdc.compiler.interpret_core import Context, Tensor, Value, evaluates


@evaluates(ops_capture.Positions)
def positions(op: ops_capture.Positions, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return torch.arange(inputs[0].shape[1], dtype=torch.int32)


@evaluates(ops_capture.CausalMask)
def causal_mask(op: ops_capture.CausalMask, inputs: tuple[Tensor, ...], context: Context) -> Value:
    size = inputs[0].shape[1]
    seen = torch.ones(size, size, dtype=torch.bool).tril()
    if op.window:
        seen &= ~torch.ones(size, size, dtype=torch.bool).tril(-op.window)
    if not op.additive:
        return seen
    return torch.zeros(size, size, dtype=context.real).masked_fill(~seen, torch.finfo(torch.float32).min)


@evaluates(ops_capture.Sdpa)
def sdpa(op: ops_capture.Sdpa, inputs: tuple[Tensor, ...], context: Context) -> Value:
    q, k, v, *mask = inputs
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask[0] if mask else None, is_causal=op.causal, scale=op.scale, enable_gqa=q.shape[1] != k.shape[1])
