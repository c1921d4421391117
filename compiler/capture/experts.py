"""Mixtures of experts for torch.export: what an experts module computes, without shapes that depend on the data.

transformers asks an interface how its experts modules run. Ours says it with one op, `mlsdc::expert_linear`: each slot of each token meets
its own expert. Gating, activation and routing stay the model's own code.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

NAME = "mlsdc"


@torch.library.custom_op("mlsdc::expert_linear", mutates_args=())
def expert_linear(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x[tokens, 1 or slots, k], weight[experts, n, k], index[tokens, slots], bias[experts, n] -> [tokens, slots, n]."""
    out = torch.einsum("tsk,tsnk->tsn", x.expand(-1, index.shape[1], -1), weight[index])
    return out if bias is None else out + bias[index]


@expert_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((x.shape[0], index.shape[1], weight.shape[1]))


def experts_forward(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """What transformers' own implementations compute: hidden_states[tokens, hidden], the others [tokens, slots] -> [tokens, hidden]."""
    name = "gate_up_proj" if self.has_gate else "up_proj"
    x = _experts(self, hidden_states.unsqueeze(1), name, top_k_index)
    x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
    x = _experts(self, x, "down_proj", top_k_index)
    if getattr(self, "has_post_expert_norm", False):
        x = self.post_expert_norm(x)
    return (x * top_k_weights.unsqueeze(-1)).sum(1)


def _experts(module: Any, x: torch.Tensor, name: str, index: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    made: torch.Tensor = expert_linear(x, weight.transpose(1, 2) if module.is_transposed else weight, index, bias)
    return made


def dbrx_forward(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """DBRX's experts, which transformers runs by a loop outside of its interface: three matrices with the experts one below the other."""
    batch, length, hidden = hidden_states.shape
    glu, shape = self.mlp, (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    x = hidden_states.reshape(-1, 1, hidden)
    gate, up = (expert_linear(x, weight.view(shape), top_k_index, None) for weight in (glu.w1, glu.v1))
    down = expert_linear(glu.activation_fn(gate) * up, glu.w2.view(shape).transpose(1, 2), top_k_index, None)
    made: torch.Tensor = (down * top_k_weights.unsqueeze(-1)).sum(1).reshape(batch, length, hidden)
    return made


OUTSIDE = {"DbrxExperts": dbrx_forward}  # experts modules that do not ask the interface


@functools.cache
def register() -> bool:
    """Offer `experts_forward` to transformers' interface; whether this transformers has one."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return False
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    return True


def settle_experts(module: nn.Module) -> None:
    """Let every experts module of `module` run by `expert_linear`, in place."""
    for part in module.modules():
        forward = OUTSIDE.get(type(part).__name__)
        if forward is not None:
            part.forward = functools.partial(forward, part)
    config = getattr(module, "config", None)
    if config is not None and register():
        config._experts_implementation = NAME
        for part in module.modules():
            if hasattr(part, "config") and hasattr(part.config, "_experts_implementation"):
                part.config._experts_implementation = NAME
