"""Facts of a trained head, as its file's header says them; canonical tensor names are in docs/heads.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Union

from mlsdc.compiler.errors import HeadError

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class EagleConfig:
    """One decoder layer over (the target's hidden state at t, the token at t + 1), whose output stands for the hidden state at t + 1.

    `taps`: residual streams of the target it reads, as numbers of layers passed. `style` is how the token comes in:
    `fused`: x = fc([embed_norm(e) ; hidden_norm(h)]), then a plain decoder layer;
    `eagle3`: x = fc([taps]) at the first row (or the row's own last output), and attention over [input_layernorm(e) ; hidden_norm(x)].
    `norm_before_residual` (eagle3): the residual starts at hidden_norm(x), not at x. `draft_vocab` rows of the head, of the target's
    `vocab_size`. `own_head`, `own_embed`: the file brings them; otherwise they are the target's.
    """

    hidden_size: int
    target_hidden: int
    vocab_size: int
    draft_vocab: int
    taps: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    rope_theta: float
    style: str = "fused"
    norm_before_residual: bool = False
    own_head: bool = False
    own_embed: bool = False
    act: str = "silu"
    kind: str = "eagle"

    def shapes(self) -> Shapes:
        """Name -> shape of every tensor the file must have."""
        h, q, kv, m = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.intermediate_size
        eagle3 = self.style == "eagle3"
        wide = 2 * h if eagle3 else h
        taps = self.target_hidden * len(self.taps)
        shapes: dict[str, tuple[int, ...]] = {"hidden_norm": (h if eagle3 else self.target_hidden,), "embed_norm": (h,)}
        if not eagle3 or taps != h:
            shapes["fc"] = (h, taps if eagle3 else h + taps)
        if not eagle3:
            shapes["attn_norm"] = (h,)
        shapes |= {"q": (q, wide), "k": (kv, wide), "v": (kv, wide), "o": (h, q), "mlp_norm": (h,), "gate": (m, h), "up": (m, h),
                   "down": (h, m), "norm": (h,)}
        if self.own_head:
            shapes["lm_head"] = (self.draft_vocab, h)
        if self.own_embed:
            shapes["embed"] = (self.vocab_size, h)
        return shapes


@dataclass(frozen=True)
class MedusaConfig:
    """`num_heads` heads on the target's last hidden state h (after its final norm): head i guesses the token i + 1 places after the one
    the target chose there.

    z_i = h + silu(W_i h + b_i), then a projection to the vocabulary; with `known_next` z_i = h + silu(W_i h + U embed_norm(e)), e the
    embedding of the token the target chose. `num_layers` residual blocks a head. `first`: how many places after the row's own token head 0
    guesses. `own_norm`: the file brings the norm before the heads. An *exit* of kind `exit` is one head of `first` 1 on an inner layer.
    """

    hidden_size: int
    target_hidden: int
    vocab_size: int
    draft_vocab: int
    num_heads: int
    eps: float
    taps: tuple[int, ...]
    num_layers: int = 1
    known_next: bool = False
    bias: bool = False
    own_head: bool = False
    first: int = 2
    own_norm: bool = False
    kind: str = "medusa"

    def shapes(self) -> Shapes:
        h = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(self.num_heads):
            for j in range(self.num_layers):
                shapes[f"heads.{i}.{j}"] = (h, h)
                if self.bias:
                    shapes[f"heads.{i}.{j}.bias"] = (h,)
            if self.own_head:
                shapes[f"heads.{i}.lm_head"] = (self.draft_vocab, h)
        if self.own_norm:
            shapes["hidden_norm"] = (h,)
        if self.known_next:
            shapes |= {"next": (h, h), "embed_norm": (h,)}
        return shapes


HeadConfig = Union[EagleConfig, MedusaConfig]
KINDS: dict[str, type[EagleConfig] | type[MedusaConfig]] = {"eagle": EagleConfig, "medusa": MedusaConfig, "exit": MedusaConfig}


def to_json(config: HeadConfig) -> str:
    return json.dumps(asdict(config), sort_keys=True)


def from_json(text: str, where: str) -> HeadConfig:
    """Raises HeadError, naming `where`."""
    try:
        raw: dict[str, Any] = json.loads(text)
        cls = KINDS[raw["kind"]]
        known = {field.name for field in fields(cls)}
        if extra := sorted(set(raw) - known):
            raise HeadError(f"{where}: config has '{extra[0]}', which a head of kind '{raw['kind']}' does not know")
        return cls(**{**raw, "taps": tuple(raw["taps"])})
    except (ValueError, KeyError, TypeError) as error:
        raise HeadError(f"{where}: its header is not a head's ({type(error).__name__}: {error})") from None
