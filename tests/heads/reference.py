"""EAGLE-3 and Medusa in plain torch, written from their papers: what heads of every layout are compared with. Float64, one sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

Tensor = torch.Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor, theta: float) -> Tensor:
    """RoPE of x[n, heads, d] at positions 0..n-1, in halves."""
    n, _, d = x.shape
    angles = torch.arange(n, dtype=x.dtype)[:, None] / theta ** (torch.arange(0, d, 2, dtype=x.dtype) / d)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q[n, heads, d] over k, v[n, kv_heads, d]."""
    n, heads, d = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(d)
    scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(n, -1)


def eagle3(w: Mapping[str, Tensor], layer: str, taps: Tensor, embed: Tensor, *, heads: int, kv_heads: int, head_dim: int, eps: float,
           theta: float, norm_before_residual: bool) -> tuple[Tensor, Tensor]:
    """Tensors under the checkpoint's own names; taps[n, 3 h], embed[n, h] -> (logits[n, draft_vocab], hidden[n, h])."""
    n = len(taps)
    x = taps @ w["fc.weight"].T
    h = norm(x, w[f"{layer}.hidden_norm.weight"], eps)
    residual = h if norm_before_residual else x
    both = torch.cat([norm(embed, w[f"{layer}.input_layernorm.weight"], eps), h], -1)
    q, k, v = (both @ w[f"{layer}.self_attn.{part}_proj.weight"].T for part in "qkv")
    q, k, v = q.view(n, heads, head_dim), k.view(n, kv_heads, head_dim), v.view(n, kv_heads, head_dim)
    x = residual + attended(turned(q, theta), turned(k, theta), v) @ w[f"{layer}.self_attn.o_proj.weight"].T
    y = norm(x, w[f"{layer}.post_attention_layernorm.weight"], eps)
    gate, up = (y @ w[f"{layer}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    x = x + (torch.nn.functional.silu(gate) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"], eps) @ w["lm_head.weight"].T, x


def medusa(w: Mapping[str, Tensor], hidden: Tensor, num_heads: int, num_layers: int) -> list[Tensor]:
    """hidden[n, h] after the target's last norm -> each head's logits[n, vocab]."""
    out = []
    for i in range(num_heads):
        x = hidden
        for j in range(num_layers):
            x = x + torch.nn.functional.silu(x @ w[f"{i}.{j}.linear.weight"].T + w[f"{i}.{j}.linear.bias"])
        out.append(x @ w[f"{i}.{num_layers}.weight"].T)
    return out
