"""A decoder like OpenELM, whose layers differ in heads and in the width of their MLP. transformers has none; this registers one with it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

KV_HEADS, GROUP, WIDTHS = (1, 2), 2, (64, 128)


class OpenElmConfig(transformers.PretrainedConfig):
    model_type = "openelm"

    def __init__(
        self, vocab_size: int = 256, hidden_size: int = 128, num_hidden_layers: int = 2, head_dim: int = 32,
        max_position_embeddings: int = 256, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.vocab_size, self.hidden_size, self.num_hidden_layers, self.head_dim = vocab_size, hidden_size, num_hidden_layers, head_dim
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Layer(nn.Module):
    def __init__(self, config: OpenElmConfig, index: int) -> None:
        super().__init__()
        self.kv, self.dim = KV_HEADS[index % len(KV_HEADS)], config.head_dim
        self.heads, width = GROUP * self.kv, WIDTHS[index % len(WIDTHS)]
        self.attn_norm, self.ffn_norm = Norm(config.hidden_size), Norm(config.hidden_size)
        self.q_norm, self.k_norm = Norm(self.dim), Norm(self.dim)
        self.qkv_proj = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv) * self.dim, bias=False)
        self.out_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)
        self.proj_1 = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.proj_2 = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        qkv = self.qkv_proj(self.attn_norm(x)).view(batch, length, -1, self.dim).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv, self.kv], dim=1)
        q, k = (turned(norm(value), cos, sin) for norm, value in ((self.q_norm, q), (self.k_norm, k)))
        k, v = (value[:, :, None].expand(batch, self.kv, GROUP, length, self.dim).reshape(batch, -1, length, self.dim) for value in (k, v))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
        x = x + self.out_proj(made)
        gate, up = self.proj_1(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.proj_2(F.silu(gate) * up)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class OpenElmForCausalLM(transformers.PreTrainedModel, transformers.GenerationMixin):
    config_class = OpenElmConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: OpenElmConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Norm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.inv_freq = nn.Buffer(10000.0**-half, persistent=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        x = self.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        angles = positions[:, None].float() * self.inv_freq.to(input_ids.device)
        both = torch.cat((angles, angles), dim=-1)[None, None]
        for layer in self.layers:
            x = layer(x, both.cos(), both.sin())
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(self.norm(x)))

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": input_ids}


transformers.AutoConfig.register("openelm", OpenElmConfig, exist_ok=True)
transformers.AutoModelForCausalLM.register(OpenElmConfig, OpenElmForCausalLM, exist_ok=True)
