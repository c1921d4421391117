"""The frozen target in torch: hidden states for training, and what it lends to a head."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mlsdc.compiler.capture import ModelSource
from mlsdc.compiler.capture.hf_module import hf_module
from mlsdc.compiler.errors import HeadError
from mlsdc.compiler.heads.modules import Frozen, Tensor


class _Enough(Exception):
    """The last tap is there."""


class FrozenTarget:
    """The target's layers, in `dtype`, on `device`. `layers` counts decoder layers: tap k is the residual stream after k of them."""

    def __init__(self, source: ModelSource, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> None:
        module: Any = hf_module(source.config)
        names = set(source.weights.names())
        state = {}
        for name, _ in module.named_parameters():
            if name in names:
                state[name] = torch.from_numpy(np.array(source.weights.read(name)))
        module.load_state_dict(state, strict=False, assign=True)
        module.tie_weights()
        left = [name for name, p in module.named_parameters() if p.is_meta]
        if left:
            raise HeadError(f"{source.label}: has no tensor '{left[0]}'")
        self.body: Any = module.get_decoder()
        self.layers = len(self.body.layers)
        self.embed: Tensor = self.body.embed_tokens.weight.detach().float()
        self.head: Tensor = module.get_output_embeddings().weight.detach().float()
        self.norm: Tensor = self.body.norm.weight.detach().float()
        self.eps = float(getattr(self.body.norm, "variance_epsilon", getattr(self.body.norm, "eps", 1e-6)))
        self.config: Any = module.config
        self.device = device
        self.module = module.to(dtype).to(device)

    def lend(self, draft_ids: Tensor) -> Frozen:
        return Frozen(self.embed, self.head[draft_ids].contiguous(), self.norm)

    @torch.no_grad()
    def hidden(self, tokens: Tensor, taps: tuple[int, ...]) -> Tensor:
        """tokens i64[b, n] (padded behind; causal, so padding reaches nobody) -> bf16[b, n, taps * hidden].

        Layers behind the last tap are not run: an exit after a third of them learns three times as fast.
        """
        kept: dict[int, Tensor] = {}
        hooks = []

        def keep(tap: int) -> Any:
            def hook(_: Any, __: Any, out: Any) -> None:
                kept[tap] = (out[0] if isinstance(out, tuple) else out).detach().to("cpu", torch.bfloat16)
                if tap == max(taps):
                    raise _Enough

            return hook

        for tap in dict.fromkeys(taps):
            hooks.append((self.body.layers[tap - 1] if tap else self.body.embed_tokens).register_forward_hook(keep(tap)))
        try:
            self.body(input_ids=tokens.to(self.device), use_cache=False)
        except _Enough:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([kept[tap] for tap in taps], -1)
