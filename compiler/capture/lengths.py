"""What an exported model computes from the sequence's length alone (positions, causal masks), recognised by evaluating it.

Transformers builds a mask from arange, diff, cumsum and comparisons, differently in every release, and others use tril. Instead of matching
those graphs, the part that depends on no token is run at a few lengths: what equals 0, 1, 2, ... is positions, what equals a lower triangle
is a causal mask, a band below the diagonal a sliding window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mlsdc.compiler.ops_capture import CausalMask, Positions

_LENGTHS = (7, 33)
_MAX_PROBE = 4200  # bool[4200, 4200] is 17 MB
_HIDDEN = -1e4  # an additive mask hides with this or less


@dataclass
class LengthValues:
    """Evaluates length-only nodes on the CPU. `leaves` are placeholders with known values (buffers, lifted constants)."""

    leaves: Mapping[fx.Node, torch.Tensor]
    tokens: fx.Node

    def __post_init__(self) -> None:
        self._memo: dict[tuple[fx.Node, int], Any] = {}
        self._known: dict[fx.Node, bool] = {}

    def known(self, node: fx.Node) -> bool:
        """True if the node's value follows from the sequence's length."""
        if node not in self._known:
            if node.op == "placeholder":
                self._known[node] = node in self.leaves
            elif node.op != "call_function":
                self._known[node] = False
            elif _is_size(node):
                self._known[node] = True  # the shape of anything is known from the length
            else:
                self._known[node] = all(self.known(n) for n in node.all_input_nodes)
        return self._known[node]

    def at(self, node: fx.Node, length: int) -> Any:
        """The node's value for a sequence of `length`."""
        key = (node, length)
        if key not in self._memo:
            self._memo[key] = self._evaluate(node, length)
        return self._memo[key]

    def _evaluate(self, node: fx.Node, length: int) -> Any:
        if node in self.leaves:
            return self.leaves[node]
        if _is_size(node):
            source, axis = node.args[0], node.args[1]
            assert isinstance(source, fx.Node)
            assert isinstance(axis, int)
            size = source.meta["val"].shape[axis]
            return size if isinstance(size, int) else length

        def value(argument: Any) -> Any:
            return torch.device("cpu") if isinstance(argument, torch.device) else argument

        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), value)
        args, kwargs = fx.node.map_arg((args, kwargs), lambda n: self.at(n, length))
        if "_assert" in str(node.target):
            return None
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def recognise(self, node: fx.Node) -> Positions | CausalMask | None:
        """The op that gives the same values at several lengths, or None."""
        shape = node.meta["val"].shape
        dynamic = [i for i, size in enumerate(shape) if not isinstance(size, int)]
        if all(size == 1 for size in shape if isinstance(size, int)):
            if len(dynamic) == 1 and self._always(node, _LENGTHS, lambda value, n: bool((value.reshape(-1) == torch.arange(n)).all())):
                return Positions()
            if dynamic == [len(shape) - 2, len(shape) - 1]:
                return self._mask(node)
        return None

    def recognise_hidden(self, node: fx.Node) -> CausalMask | None:
        """For a bool mask that is true where a key is *not* seen: the additive mask that says the same."""
        shape = node.meta["val"].shape
        if node.meta["val"].dtype is not torch.bool or len(shape) < 2 or any(isinstance(size, int) for size in shape[-2:]):
            return None
        found = self._mask(node, hidden=True)
        return CausalMask(found.window, additive=True) if found else None

    def _mask(self, node: fx.Node, *, hidden: bool = False) -> CausalMask | None:
        numbers = self._numbers(node)
        windows = [n for n in sorted(numbers) if 1 < n <= _MAX_PROBE - 8]
        lengths = (*_LENGTHS, *(n + 8 for n in windows[-2:]))
        additive = node.meta["val"].dtype is not torch.bool
        for window in (0, *windows, *(n + 1 for n in windows)):
            if self._always(node, lengths, lambda value, n, w=window: _is_causal(~value if hidden else value, n, w)):  # type: ignore[misc]
                return CausalMask(window, additive)
        return None

    def _always(self, node: fx.Node, lengths: tuple[int, ...], holds: Callable[[torch.Tensor, int], bool]) -> bool:
        return all(holds(self.at(node, n), n) for n in lengths)

    def _numbers(self, node: fx.Node) -> set[int]:
        """Integer constants in the node's history: a sliding window is one of them."""
        found: set[int] = set()
        seen: set[fx.Node] = set()
        pending = [node]
        while pending:
            at = pending.pop()
            if at in seen:
                continue
            seen.add(at)
            if not _is_size(at):
                pending.extend(at.all_input_nodes)
                found |= {abs(a) for a in at.args if type(a) is int}
        return found


def _is_size(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.aten.sym_size.int


def _is_causal(value: torch.Tensor, n: int, window: int) -> bool:
    matrix = value.reshape(n, n)
    seen = matrix if matrix.dtype is torch.bool else matrix == 0
    if matrix.dtype is not torch.bool and not bool((matrix[~seen] <= _HIDDEN).all()):
        return False
    wanted = torch.ones(n, n, dtype=torch.bool).tril()
    if window:
        wanted &= ~torch.ones(n, n, dtype=torch.bool).tril(-window)
    return bool((seen == wanted).all())
