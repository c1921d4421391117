"""The heads as torch modules, for training. Tensors are named as in config.py; the embedding and the head rows are the target's, frozen."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from mlsdc.compiler.heads.config import EagleConfig, MedusaConfig

Tensor = torch.Tensor


@dataclass(frozen=True)
class Frozen:
    """What the target lends: embedding f32[vocab, hidden], head rows of the draft vocabulary f32[draft_vocab, hidden], norm f32[hidden]."""

    embed: Tensor
    head: Tensor
    norm: Tensor


@dataclass(frozen=True)
class Batch:
    """Padded sequences: tokens i64[b, n], hidden f32[b, n, taps * hidden], labels i64[b, n].

    `labels[t]` is the draft id of token t, -1 where it is padding, not to be learned from, or outside of the draft vocabulary;
    `counted[t]` says that token t is a text to be guessed, whether the draft vocabulary has it or not. `last` f32[b, n, hidden] is the
    target's residual stream after all layers, where a head learns from the target's own distributions.
    """

    tokens: Tensor
    hidden: Tensor
    labels: Tensor
    counted: Tensor
    last: Tensor | None = None


@dataclass(frozen=True)
class Taught:
    """The target's log probabilities f32[m, draft_vocab] of m tokens, given the text before; token t of row b is number place[b, t]."""

    logp: Tensor
    place: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * weight


def rope_table(length: int, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos, sin f32[length, dim / 2]."""
    freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * freq
    return angles.cos(), angles.sin()


def rope(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """x[b, heads, n, d], halves turned."""
    cos, sin = table
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Head(nn.Module, ABC):
    """Base: parameters by canonical name, dots as underscores."""

    config: EagleConfig | MedusaConfig
    frozen: Frozen
    soft: float = 0.0  # share of the loss that compares distributions with the target's, instead of first guesses with its text

    def make(self, shapes: dict[str, tuple[int, ...]], zero: tuple[str, ...], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            if len(shape) == 1:
                value = torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
            elif name.startswith(zero):
                value = torch.zeros(shape)
            else:
                value = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
            self.register_parameter(name.replace(".", "__"), nn.Parameter(value))

    def p(self, name: str) -> Tensor:
        value: Tensor = getattr(self, name.replace(".", "__"))
        return value

    def begin_with(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from finished weights, by canonical name."""
        with torch.no_grad():
            for name, value in tensors.items():
                self.p(name).copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        return {name.replace("__", "."): value.detach() for name, value in self.named_parameters()}

    @abstractmethod
    def losses(self, batch: Batch) -> tuple[Tensor, list[tuple[int, int]]]:
        """The loss, and per depth (right, counted): how often the first guess was the text."""

    def taught(self, batch: Batch) -> Taught | None:
        """What the target itself thought of the tokens to be learned from; None if nothing is learned from that."""
        if batch.last is None or not self.training or self.soft == 0:
            return None
        known = batch.labels >= 0
        known[:, 0] = False  # nothing stands before it
        with torch.no_grad():
            rows = rms_norm(batch.last[:, :-1][known[:, 1:]], self.frozen.norm, self.config.eps)
            return Taught(torch.log_softmax((rows @ self.frozen.head.T).float(), -1), known.flatten().cumsum(0).view(known.shape) - 1)

    def cross_entropy(self, logits: Tensor, labels: Tensor, taught: Tensor | None) -> Tensor:
        """Mean over rows of logits against labels i64[m] and, as far as `soft` says, against the target's log probabilities `taught`."""
        hard = F.cross_entropy(logits, labels)
        if taught is None:
            return hard
        return (1 - self.soft) * hard - self.soft * (taught.exp() * torch.log_softmax(logits, -1)).sum(-1).mean()


class EagleHead(Head):
    """`unroll` passes, each fed the last one's outputs: what the head sees while it drafts deeper (EAGLE-3's training-time test)."""

    def __init__(self, config: EagleConfig, frozen: Frozen, *, seed: int = 0, unroll: int = 3, decay: float = 0.8) -> None:
        super().__init__()
        self.config: EagleConfig = config
        self.frozen, self.unroll, self.decay = frozen, unroll, decay
        self.make(dict(config.shapes()), ("o", "down"), seed)
        with torch.no_grad():
            self.p("norm").copy_(frozen.norm)
            if config.style == "fused" and config.target_hidden == config.hidden_size:  # begin as the target: x is its normed hidden state
                self.p("fc").mul_(0.3)
                self.p("fc")[:, config.hidden_size :] += torch.eye(config.hidden_size)

    def logits(self, out: Tensor) -> Tensor:
        return rms_norm(out, self.p("norm"), self.config.eps) @ (self.p("lm_head") if self.config.own_head else self.frozen.head).T

    def step(self, hidden: Tensor, embed: Tensor, keys: list[Tensor], values: list[Tensor], table: tuple[Tensor, Tensor]) -> Tensor:
        """Pass number len(keys): hidden[b, n, .] at t and the token at t + 1 -> output [b, n, hidden]; adds its keys and values.

        A row of pass j sees pass 0's keys up to t - j, and one key of each later pass: those its own path would have made.
        """
        c = self.config
        first = not keys
        if c.style == "eagle3":
            x = hidden.float() @ self.p("fc").T if first and "fc" in c.shapes() else hidden.float()
            normed = rms_norm(x, self.p("hidden_norm"), c.eps)
            attended = torch.cat([rms_norm(embed, self.p("embed_norm"), c.eps), normed], -1)
            x = normed if c.norm_before_residual else x
        else:
            both = [rms_norm(embed, self.p("embed_norm"), c.eps), rms_norm(hidden, self.p("hidden_norm"), c.eps)]
            x = torch.cat(both, -1) @ self.p("fc").T
            attended = rms_norm(x, self.p("attn_norm"), c.eps)
        b, n, _ = x.shape

        def split(name: str, heads: int) -> Tensor:
            return (attended @ self.p(name).T).float().view(b, n, heads, c.head_dim).transpose(1, 2)

        q = rope(split("q", c.num_heads), table)
        keys.append(rope(split("k", c.num_kv_heads), table).repeat_interleave(c.num_heads // c.num_kv_heads, 1))
        values.append(split("v", c.num_kv_heads).repeat_interleave(c.num_heads // c.num_kv_heads, 1))
        depth = len(keys) - 1
        scale = 1 / math.sqrt(c.head_dim)
        seen = torch.ones(n, n, dtype=torch.bool).tril(-depth)
        scores = [(q @ keys[0].transpose(-1, -2) * scale).masked_fill(~seen, -1e30)]
        for j in range(1, depth + 1):  # pass j's key that lies on the path of pass depth's row t is row t - (depth - j)
            scores.append((q * shifted(keys[j], depth - j)).sum(-1, keepdim=True) * scale)
        weights = torch.softmax(torch.cat(scores, -1), -1)
        read = weights[..., :n] @ values[0]
        for j in range(1, depth + 1):
            read = read + weights[..., n + j - 1 : n + j] * shifted(values[j], depth - j)
        x = x + read.transpose(1, 2).reshape(b, n, -1) @ self.p("o").T
        y = rms_norm(x, self.p("mlp_norm"), c.eps)
        gated = F.silu(y @ self.p("gate").T) * (y @ self.p("up").T)
        return x + gated @ self.p("down").T

    def losses(self, batch: Batch) -> tuple[Tensor, list[tuple[int, int]]]:
        c = self.config
        rows = batch.tokens.shape[1] - 1  # row t: the hidden state at t, the token at t + 1
        table = rope_table(rows, c.head_dim, c.rope_theta)
        embed = F.embedding(batch.tokens[:, 1:], self.p("embed") if c.own_embed else self.frozen.embed)
        hidden = batch.hidden[:, :rows]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        total = torch.zeros(())
        counts: list[tuple[int, int]] = []
        taught = self.taught(batch)
        for depth in range(self.unroll):
            out = self.step(hidden, embed, keys, values, table)
            valid = slice(depth, rows - 1)  # rows before `depth` have no such path; the last row's text is not there
            loss, count = self.guessed_rows(out[:, valid], batch, valid, taught)
            total = total + self.decay**depth * loss
            counts.append(count)
            hidden = shifted_rows(out, 1)
        return total, counts

    def guessed_rows(self, out: Tensor, batch: Batch, valid: slice, taught: Taught | None) -> tuple[Tensor, tuple[int, int]]:
        """Logits only where there is something to learn: most of a prompt's rows are not."""
        labels, counted = (x[:, 2:][:, valid].reshape(-1) for x in (batch.labels, batch.counted))
        known = labels >= 0
        if not bool(known.any()):
            return out.float().sum() * 0.0, (0, int(counted.sum()))
        logits = self.logits(out.reshape(-1, out.shape[-1])[known]).float()
        right = int((logits.argmax(-1) == labels[known]).sum())
        soft = None if taught is None else taught.logp[taught.place[:, 2:][:, valid].reshape(-1)[known]]
        return self.cross_entropy(logits, labels[known], soft), (right, int(counted.sum()))


def shifted(x: Tensor, by: int) -> Tensor:
    """x[b, heads, n, d] moved `by` rows on, zeros in front."""
    return x if by == 0 else F.pad(x, (0, 0, by, 0))[:, :, : x.shape[2]]


def shifted_rows(x: Tensor, by: int) -> Tensor:
    """x[b, n, d] moved `by` rows on, zeros in front."""
    return F.pad(x, (0, 0, by, 0))[:, : x.shape[1]]


class MedusaHead(Head):
    """`share` of the rows is learned from at each step: a head's logits cost more than the head."""

    def __init__(self, config: MedusaConfig, frozen: Frozen, *, seed: int = 0, decay: float = 0.8, share: float = 1.0) -> None:
        super().__init__()
        self.config: MedusaConfig = config
        self.frozen, self.decay, self.share = frozen, decay, share
        self.make(dict(config.shapes()), ("heads.",), seed)
        self.generator = torch.Generator().manual_seed(seed)
        if config.own_norm:
            with torch.no_grad():
                self.p("hidden_norm").copy_(frozen.norm)

    def states(self, hidden: Tensor, embed: Tensor) -> list[Tensor]:
        """hidden[m, h] after the target's norm, embed[m, h] of the known next token -> each head's state [m, h]."""
        c = self.config
        known = rms_norm(embed, self.p("embed_norm"), c.eps) @ self.p("next").T if c.known_next else 0.0
        states = []
        for i in range(c.num_heads):
            x = hidden
            for j in range(c.num_layers):
                bias = self.p(f"heads.{i}.{j}.bias") if c.bias else 0.0
                x = x + F.silu(x @ self.p(f"heads.{i}.{j}").T + bias + (known if j == 0 else 0.0))
            states.append(x)
        return states

    def losses(self, batch: Batch) -> tuple[Tensor, list[tuple[int, int]]]:
        c = self.config
        last = batch.tokens.shape[1] - c.first
        rows = batch.counted[:, c.first : c.first + last]
        if self.training and self.share < 1.0:
            rows = rows & (torch.rand(rows.shape, generator=self.generator) < self.share)
        at, t = rows.nonzero(as_tuple=True)
        hidden = rms_norm(batch.hidden[at, t], self.p("hidden_norm") if c.own_norm else self.frozen.norm, c.eps)
        states = self.states(hidden, F.embedding(batch.tokens[at, t + 1], self.frozen.embed))
        total, counts = torch.zeros(()), []
        padded = F.pad(batch.labels, (0, c.num_heads), value=-1)
        taught = self.taught(batch)
        places = None if taught is None else F.pad(taught.place, (0, c.num_heads))
        counted = F.pad(batch.counted, (0, c.num_heads))
        for i, state in enumerate(states):
            head = self.p(f"heads.{i}.lm_head") if c.own_head else self.frozen.head
            labels = padded[at, t + c.first + i]
            known = labels >= 0
            logits = (state[known] @ head.T).float()
            if len(logits):
                soft = None if taught is None or places is None else taught.logp[places[at, t + c.first + i][known]]
                total = total + self.decay**i * self.cross_entropy(logits, labels[known], soft)
            counts.append((int((logits.argmax(-1) == labels[known]).sum()), int(counted[at, t + c.first + i].sum())))
        return total, counts


def make_head(config: EagleConfig | MedusaConfig, frozen: Frozen, **options: Any) -> Head:
    return EagleHead(config, frozen, **options) if isinstance(config, EagleConfig) else MedusaHead(config, frozen, **options)
