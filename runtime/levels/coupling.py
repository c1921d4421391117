"""Drafting for requests that draw: proposals look at the draws by which the target will choose (law L1).

The target's choice at turn t is argmax log p(x) + Gumbel(seed, t, x). A level that believes in q ranks its guesses by log q(x) + the same
Gumbel: its first guess is what the target would choose if p were q, and is right with a probability of at least (1 - TV) / (1 + TV), TV
the total variation distance of p and q (Bavarian et al. 2016; for sampling: Daliri, Musco, Suresh 2024). Without the draws a guess x is
right with probability p(x). What is proposed never changes the text.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mlsdc.runtime.sampling.noise import gumbel
from mlsdc.runtime.step import Array, aligned

if TYPE_CHECKING:
    from mlsdc.runtime.device.base import NativeFunction
    from mlsdc.runtime.sampling_params import SamplingParams

NATIVE = "guess_draws"


@dataclass(frozen=True)
class Draw:
    """How one request draws: its seed, and what shapes its distribution."""

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @staticmethod
    def of(seed: int, params: SamplingParams) -> Draw:
        return Draw(seed, params.temperature, max(params.top_k, 0), params.top_p, params.min_p)

    @property
    def cuts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def as_drawn(logp: Array, draws: Sequence[Draw]) -> tuple[Array, Array]:
    """Log probabilities f32[m, k] of each row's best guesses, best first, at temperature 1 -> (f64[m, k] as row i's request draws them,
    f64[m] what is left for tokens that were not guessed).

    What was not guessed counts as tokens as likely as the last guess, as many as its mass makes: at most so much at temperatures below 1.
    """
    mass = np.exp(logp.astype(np.float64))
    inverse = np.array([1 / draw.temperature for draw in draws])
    with np.errstate(invalid="ignore", over="ignore"):
        q = np.exp((logp - logp[:, :1]) * inverse[:, None])
    q = np.nan_to_num(q, nan=0.0, posinf=0.0)
    last = mass[:, -1]
    rest = np.where(last > 0, np.maximum(0.0, 1 - mass.sum(1)) / np.where(last > 0, last, 1) * q[:, -1], 0.0)
    if any(draw.cuts for draw in draws):
        q, rest = _cut(q, rest, draws)
    total = np.maximum(q.sum(1) + rest, 1e-300)
    return q / total[:, None], rest / total


def _cut(q: Array, rest: Array, draws: Sequence[Draw]) -> tuple[Array, Array]:
    """Without what top_k, top_p (of what top_k kept) and min_p throw away."""
    k = q.shape[1]
    top_k = np.array([draw.top_k or 1 << 30 for draw in draws])
    q = np.where(np.arange(k) < top_k[:, None], q, 0.0)
    rest = np.where(top_k > k, rest, 0.0)
    wanted = np.array([draw.top_p for draw in draws]) * (q.sum(1) + rest)
    sums = np.cumsum(q, 1)
    rest = np.where(sums[:, -1] < wanted, np.minimum(rest, wanted - sums[:, -1]), 0.0)
    q = np.where(sums - q < wanted[:, None], q, 0.0)
    least = np.array([draw.min_p for draw in draws]) * q[:, 0]
    return np.where(q >= least[:, None], q, 0.0), np.where(q[:, -1] >= least, rest, 0.0)


class Draws:
    """The exponential draws E(seed, turn, token) = exp(-Gumbel) of many tokens: by the artifact's native code, if it has any.

    `watch(turn, tokens, q, first)` is told of every row that is coupled: its guesses with their probabilities as its request draws, and the
    one that comes first then (benchmarks).
    """

    def __init__(self, functions: Callable[[str], NativeFunction | None] = lambda name: None) -> None:
        self._native = functions(NATIVE)
        self.watch: Callable[[int, Array, Array, int], None] | None = None
        self._rows = self._k = 0

    def of(self, draws: Sequence[Draw], turns: Array, tokens: Array) -> Array:
        """f64[m, k], positive: of row i's tokens i32[m, k] at turn turns[i] (the index of the token to be chosen in its sequence)."""
        rows, k = tokens.shape
        if self._native is None:
            return np.stack([np.exp(-gumbel(draw.seed, int(turn), row)) for draw, turn, row in zip(draws, turns, tokens, strict=True)])
        if rows > self._rows or k != self._k:
            self._make(max(rows, self._rows), k)
        self._seeds[:rows] = [draw.seed for draw in draws]
        self._turns[:rows] = turns
        self._tokens[:rows] = tokens
        self._native(0, rows, *self._addresses, k)
        return self._found[:rows].copy()

    def _make(self, rows: int, k: int) -> None:
        self._rows, self._k = rows, k
        self._seeds, self._turns = aligned((rows,), "u8"), aligned((rows,), "i4")
        self._tokens, self._found = aligned((rows, k), "i4"), aligned((rows, k), "f8")
        self._addresses = [ctypes.c_void_p(array.ctypes.data) for array in (self._seeds, self._turns, self._tokens, self._found)]


def coupled(logp: Array, tokens: Array, owners: Sequence[Draw | None], turns: Sequence[int], draws: Draws) -> tuple[Array, Array]:
    """Guesses of rows (log probabilities f32[m, k], tokens i32[m, k], best first) as the request of each row should try them, again best
    first. Rows without an owner that draws stay as they are.

    A guess's probability becomes the chance that its token is drawn, as far as the level knows: q / E over the sum of all q / E.
    """
    rows = [i for i, owner in enumerate(owners) if owner is not None]
    if not rows:
        return logp, tokens
    who = [owner for owner in owners if owner is not None]
    q, rest = as_drawn(logp[rows], who)
    weights = q / np.maximum(draws.of(who, np.array(turns, np.int32)[rows], tokens[rows]), 1e-30)
    with np.errstate(divide="ignore"):
        chances = np.log(weights / np.maximum(weights.sum(1) + rest, 1e-300)[:, None])
    order = np.argsort(-chances, axis=1, kind="stable")
    logp, tokens = logp.copy(), tokens.copy()
    found = np.take_along_axis(tokens[rows], order, 1)
    if draws.watch is not None:
        for at, row in enumerate(rows):
            draws.watch(turns[row], tokens[row].copy(), q[at], int(found[at, 0]))
    logp[rows], tokens[rows] = np.take_along_axis(chances, order, 1), found
    return logp, tokens
