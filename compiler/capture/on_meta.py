"""Modules on the meta device: weights take no memory, while the numbers that a graph needs stay known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class EmptyOnMeta(TorchFunctionMode):
    """What modules allocate to be filled later (torch.empty) takes no memory; what they compute (frequencies, scales) is computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class NumbersOnMeta(TorchFunctionMode):
    """torch.tensor(0.0, device="meta") forgets its number; torch.full is traced with it. (Masks of transformers before 5.24 have such.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and isinstance(args[0], int | float) and str(kwargs.get("device", "")).startswith("meta"):
            return torch.full((), args[0], **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def buffers_on_meta(module: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """While it lasts the module's buffers have no values; they are given by name."""
    kept = {name: buffer for name, buffer in module.named_buffers() if not buffer.is_meta}
    for name, buffer in kept.items():
        path, _, last = name.rpartition(".")
        module.get_submodule(path)._buffers[last] = buffer.to("meta")
    try:
        yield kept
    finally:
        for name, buffer in kept.items():
            path, _, last = name.rpartition(".")
            module.get_submodule(path)._buffers[last] = buffer
