"""Small models to capture: Hugging Face configs of several families, and a plain torch module written another way."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from mlsdc.compiler.capture.torch_export import Captured, capture_module
from mlsdc.compiler.graph import Graph, Node, Weight
from mlsdc.compiler.interpret import interpret
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.passes.eliminate_common import EliminateCommon
from mlsdc.passes.eliminate_dead import EliminateDead
from mlsdc.passes.fold_constants import FoldConstants
from mlsdc.passes.raise_attention import RaiseAttention
from mlsdc.passes.raise_names import RaiseNames
from mlsdc.passes.raise_norm import RaiseNorm
from mlsdc.passes.raise_rope import RaiseRope
from mlsdc.passes.rowify import Rowify

RAISING: tuple[GraphPass, ...] = (
    FoldConstants(), EliminateCommon(), EliminateDead(), RaiseNorm(), RaiseRope(), RaiseAttention(), Rowify(64, 32), RaiseNames()
)  # fmt: skip

_BASE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip

CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "one-layer": transformers.LlamaConfig(**_BASE | {"num_hidden_layers": 1}, tie_word_embeddings=True),
    "llama": transformers.LlamaConfig(**_BASE, tie_word_embeddings=True),
    "llama-biases-untied": transformers.LlamaConfig(
        **_BASE | {"num_attention_heads": 6, "hidden_size": 48, "num_key_value_heads": 3}, attention_bias=True, mlp_bias=True),
    "llama-no-groups": transformers.LlamaConfig(**_BASE | {"num_key_value_heads": 4}),
    "qwen2": transformers.Qwen2Config(**_BASE),
    "qwen3": transformers.Qwen3Config(**_BASE, head_dim=16),
    "mistral-window": transformers.MistralConfig(**_BASE, sliding_window=5),
}  # fmt: skip


def hf_model(name: str, attention: str = "sdpa") -> nn.Module:
    """A random model of the family, on the CPU; norms are not all ones, so that a lost weight shows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation=attention).eval()
    return spread(model)


def spread(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.3)
        parameter.requires_grad_(False)
    return model


@functools.cache
def captured_hf(name: str, attention: str = "sdpa") -> tuple[nn.Module, Captured]:
    """The family's model and its capture, made once."""
    model = hf_model(name, attention)
    return model, captured(model)


def captured(model: nn.Module) -> Captured:
    return capture_module(model, max_tokens=256)


def raised(graph: Graph, passes: Sequence[GraphPass] = RAISING) -> Graph:
    for pass_ in passes:
        graph = pass_.rewrite(graph)
        graph.verify()
    return graph


def run(source: Captured, graph: Graph, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [seq, vocab] of a captured graph or a row program for tokens [seq]."""

    def weights(node: Node) -> torch.Tensor:
        assert isinstance(node.op, Weight)
        return torch.from_numpy(source.weights.read(node.op.sources[0]))

    rows = torch.arange(len(tokens), dtype=torch.int32)
    by_row = {"tokens": tokens.int(), "positions": rows, "out_rows": rows}
    inputs = by_row if len(graph.inputs()) == 3 else {"tokens": tokens[None].int()}
    logits = interpret(graph, inputs, weights)["logits"]
    assert isinstance(logits, torch.Tensor)
    return logits if logits.dim() == 2 else logits[0]


class OwnAttention(nn.Module):
    """One fused projection, RoPE by halves, keys repeated by repeat_interleave, a tril mask."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.fused = heads, kv_heads, hidden // heads, fused
        self.project = nn.Linear(hidden, (heads + 2 * kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        sizes = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
        q, k, v = self.project(x).split(sizes, -1)
        q = turn(q.view(batch, seq, self.heads, self.dim), cos, sin).transpose(1, 2)
        k = turn(k.view(batch, seq, self.kv_heads, self.dim), cos, sin).transpose(1, 2)
        v = v.view(batch, seq, self.kv_heads, self.dim).transpose(1, 2)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            group = self.heads // self.kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            seen = torch.tril(torch.ones(seq, seq, dtype=torch.bool, device=x.device))
            scores = (q @ k.transpose(-2, -1) / self.dim**0.5).masked_fill(~seen, float("-inf"))
            mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))  # type: ignore[no-any-return]


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    lo, hi = x.chunk(2, -1)
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), -1)


class OwnModel(nn.Module):
    """A decoder by someone who never saw Hugging Face's: nn.RMSNorm, angles from torch.outer, inv_freq computed on the way."""

    def __init__(self, *, fused: bool, vocab: int = 96, hidden: int = 64, layers: int = 2, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.dim = hidden // heads
        self.table = nn.Embedding(vocab, hidden)
        self.attention = nn.ModuleList(OwnAttention(hidden, heads, kv_heads, fused) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-5) for _ in range(2 * layers + 1))
        self.gate = nn.ModuleList(nn.Linear(hidden, 96, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(hidden, 96, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(96, hidden, bias=False) for _ in range(layers))
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        inv_freq = 1.0 / 10000.0 ** (torch.arange(0, self.dim, 2, device=ids.device).float() / self.dim)
        angle = torch.outer(torch.arange(ids.shape[1], device=ids.device).float(), inv_freq)
        cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
        x = self.table(ids)
        for i, attention in enumerate(self.attention):
            x = x + attention(self.norms[2 * i](x), cos, sin)
            h = self.norms[2 * i + 1](x)
            x = x + self.down[i](F.silu(self.gate[i](h)) * self.up[i](h))
        return self.head(self.norms[-1](x))  # type: ignore[no-any-return]


def own_model(*, fused: bool = False) -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return spread(OwnModel(fused=fused).eval())
