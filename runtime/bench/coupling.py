"""How far levels are from the target where it draws (temperature > 0), and how often their first guess is what it draws all the same.

One request after the other is decoded without drafts being sent, so that every token's turn is looked at; all levels are asked at each of
them. Of a turn, with p the target's distribution and q the level's, both at the request's parameters (but an n-gram level's q, which is as
it was counted: levels/ngram.py knows the draws only):

- 1 - TV = sum of min(p, q) over the level's guesses: what q says of tokens that it does not guess counts as wrong;
- at least (1 - TV) / (1 + TV) of the first guesses should be right if they follow the draws (levels/coupling.py);
- p of the level's likeliest token is how often a first guess would be right that does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mlsdc.runtime.bench.everything import Everything
from mlsdc.runtime.bench.prompts import BenchPrompt
from mlsdc.runtime.controller import Proposal
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.levels.coupling import Draw, Draws
from mlsdc.runtime.levels.ngram import NgramLevel, NgramState
from mlsdc.runtime.request import Result
from mlsdc.runtime.sampling.oracle import survivors
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.step import Array, Header, StepBuffers
from mlsdc.runtime.tree import EMPTY, Tree


class Nothing(Everything):
    """Sends none of what is proposed."""

    def choose(self, proposals: Sequence[Proposal], rows: int, sequences: int, context: int, draft_s: float) -> list[Tree]:
        return [EMPTY for _ in proposals]


@dataclass
class LevelCoupling:
    """Sums over turns of one level."""

    level: str
    turns: int = 0
    overlap: float = 0.0  # 1 - TV
    least: float = 0.0
    right: int = 0
    likeliest: float = 0.0

    def count(self, p: Array, tokens: Array, q: Array, first: int, choice: int) -> None:
        """A turn: the target's p[vocab], the level's tokens and their q, its first guess, and what the target chose."""
        overlap = float(np.minimum(p[tokens], q).sum())
        self.turns += 1
        self.overlap += overlap
        self.least += overlap / (2 - overlap)
        self.right += first == choice
        self.likeliest += float(p[tokens[np.argmax(q)]])

    def to_json(self) -> dict[str, float | str]:
        n = max(1, self.turns)
        return {"level": self.level, "turns": self.turns, "overlap": self.overlap / n, "least": self.least / n, "right": self.right / n,
                "likeliest": self.likeliest / n}

    @staticmethod
    def head() -> str:
        return f"{'first guesses of':16} {'turns':>6} {'right':>7} {'at least':>9} {'1 - TV':>7} {'without the draws':>18}"

    def line(self) -> str:
        n = max(1, self.turns)
        return (f"{self.level:16} {self.turns:6} {self.right / n:7.3f} {self.least / n:9.3f} {self.overlap / n:7.3f} "
                f"{self.likeliest / n:18.3f}")


Guess = tuple[Array, Array, int]  # tokens, q, the first one


@dataclass
class _Text:
    """What was seen while one text was written: by turn the target's p, and by level what it guessed."""

    params: SamplingParams
    target: dict[int, Array] = field(default_factory=dict)
    guesses: dict[str, dict[int, Guess]] = field(default_factory=dict)
    turn: int = -1  # the next one

    def forward(self, buffers: StepBuffers, logits: Array) -> None:
        if buffers.header[Header.OUT] == 1:
            self.turn = int(buffers.positions[buffers.out_rows[0]]) + 1
            self.target[self.turn] = as_chosen(logits[0], self.params)
            self.turn += 1

    def guessed(self, level: str, turn: int, tokens: Array, q: Array, first: int) -> None:
        if turn == self.turn:  # not of deeper nodes
            self.guesses.setdefault(level, {})[turn] = tokens, q, first


def as_chosen(logits: Array, params: SamplingParams) -> Array:
    """The distribution that a row's choice is drawn from, f32[vocab]."""
    x = logits.astype(np.float64)
    z = (x - x.max()) / params.temperature
    kept = survivors(x, z, max(params.top_k, 0), params.top_p, -np.inf if params.min_p == 0 else float(np.log(params.min_p)))
    p = np.zeros(len(x), np.float32)
    weights = np.exp(z[kept])
    p[kept] = weights / weights.sum()
    return p


def measure(engine: Engine, prompts: Sequence[BenchPrompt], params: SamplingParams) -> list[LevelCoupling]:
    """Figures of every level of the engine, which drafts for nobody from then on. Raises MlsdcError at temperature 0."""
    if params.temperature == 0:
        raise MlsdcError("--coupling: at temperature 0 nothing is drawn; give --temperature")
    levels = engine.drafting.levels
    if not levels:
        raise MlsdcError("this artifact has no drafting level: there is nothing to compare")
    found = {level.name: LevelCoupling(level.name) for level in levels}
    engine.drafting.controller = Nothing()
    seen = _Text(params)
    vocab = engine.manifest.model.vocab_size
    engine.watch_forward(lambda buffers, logits: seen.forward(buffers, logits[:, :vocab]))
    for level in levels:
        draws = getattr(level, "draws", None)
        if isinstance(draws, Draws):
            draws.watch = lambda turn, tokens, q, first, name=level.name: seen.guessed(name, turn, tokens, q, first)
    for prompt in prompts:
        seen.target.clear()
        seen.guesses.clear()
        seen.turn = -1
        (result,) = engine.generate([prompt.prompt], params)
        for level in levels:
            if isinstance(level, NgramLevel):
                seen.guesses[level.name] = counted(level, result, Draw.of(result.seed, params))
        add(found, seen, [*result.prompt_token_ids, *result.token_ids])
    return list(found.values())


def add(found: dict[str, LevelCoupling], seen: _Text, tokens: Sequence[int]) -> None:
    for name, guesses in seen.guesses.items():
        for turn, (ids, q, first) in guesses.items():
            if turn in seen.target and turn < len(tokens) and len(ids):
                found[name].count(seen.target[turn], ids, q, first, tokens[turn])


def counted(level: NgramLevel, result: Result, draw: Draw) -> dict[int, Guess]:
    """What an n-gram level guesses at every turn but the first of a text: by the plain states, which native ones equal."""
    state = NgramState(level)
    state.couple(draw)
    state.observe(result.prompt_token_ids)
    guesses: dict[int, Guess] = {}
    for token in result.token_ids:
        state.observe([token])
        followers, first = state.guesses()
        guesses[len(state.history)] = np.array([t for _, t in followers], np.int64), np.array([p for p, _ in followers]), first
    return guesses
