"""What speculation brings on given prompts: every batch is decoded plainly and with drafts in turn, by one engine.

Tokens per step and speeds are of decoding: a batch's clock starts when the last of its prompts is done. A token's time is the time since
the deltas before it, shared by the tokens of one delta.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from mlsdc.runtime.bench.cascades import cascade_of
from mlsdc.runtime.bench.coupling import LevelCoupling
from mlsdc.runtime.bench.prompts import BenchPrompt
from mlsdc.runtime.controller import Controller
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.request import Delta
from mlsdc.runtime.sampling_params import SamplingParams, Speculation

FORMAT = 1
MERGED_NODES = 32  # of a merged tree
PLAIN = Speculation(enabled=False)
SAME_STEP_S = 1e-4  # deltas that come together are of one step
STALLED = 4.0  # times the usual step: the machine did something else


@dataclass
class Side:
    """Sums of one way of decoding. `seconds` and `tokens` count what came after the batches' last first token; `stalled` is the part of the
    seconds that stalled steps took longer than usual."""

    seconds: list[float] = field(default_factory=list)
    stalled: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    stepped: int = 0  # tokens of those steps
    token_s: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return self.tokens / sum(self.seconds) if self.seconds else 0.0

    @property
    def length(self) -> float:
        return self.stepped / self.steps if self.steps else 0.0

    def quantile(self, share: float) -> float:
        ordered = sorted(self.token_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(frozen=True)
class KindFigures:
    """`ratio`: plain seconds over seconds with drafts, batch by batch (medians of rounds), all batches of the kind together."""

    kind: str
    prompts: int
    length: float
    speed: float
    plain_speed: float
    ratio: float
    p50_ms: float
    p99_ms: float
    plain_p50_ms: float
    plain_p99_ms: float
    different: int  # texts that are not the plain ones: 0 in exact mode (law L1)
    cascade: str = ""  # levels that drafted, where it is not the artifact's whole cascade


@dataclass(frozen=True)
class SpecReport:
    artifact: str
    sha256: str
    target: str
    threads: int | None
    batch: int
    temperature: float
    max_tokens: int
    rounds: int
    kinds: Sequence[KindFigures]
    coupling: Sequence[LevelCoupling] = ()

    def to_json(self) -> dict[str, Any]:
        plain = {key: value for key, value in vars(self).items() if key not in ("kinds", "coupling")}
        return {"format": FORMAT, "verb": "spec", **plain, "kinds": [vars(kind) for kind in self.kinds],
                "coupling": [level.to_json() for level in self.coupling]}

    def lines(self) -> list[str]:
        head = (f"spec: {self.artifact} ({self.sha256[:12]}), {self.target}, batch {self.batch}, T {self.temperature:g}, "
                f"{self.max_tokens} tokens, {self.rounds} rounds")
        wide = max([12, *(len(k.cascade) + 1 + len(k.kind) for k in self.kinds)])
        table = [f"{'kind':{wide}} {'prompts':>7} {'tok/step':>8} {'tok/s':>7} {'plain':>7} {'ratio':>6}   {'p50':>6} {'p99':>6} "
                 f"ms a token   {'plain p50':>9} {'p99':>6}"]
        for k in self.kinds:
            name = f"{k.cascade} {k.kind}".strip()
            table.append(f"{name:{wide}} {k.prompts:7} {k.length:8.2f} {k.speed:7.1f} {k.plain_speed:7.1f} {k.ratio:6.2f}   "
                         f"{k.p50_ms:6.2f} {k.p99_ms:6.2f}              {k.plain_p50_ms:9.2f} {k.plain_p99_ms:6.2f}")
        different = sum(k.different for k in self.kinds)
        coupling = ["", LevelCoupling.head(), *(level.line() for level in self.coupling)] if self.coupling else []
        return [head, *table, f"texts that differ from plain decoding: {different}", *coupling]


def measure(engine: Engine, prompts: Sequence[BenchPrompt], *, batch: int = 1, rounds: int = 1, max_tokens: int = 128,
            temperature: float = 0.0, seed: int = 0, cascades: Sequence[str] = (), max_nodes: int = MERGED_NODES) -> list[KindFigures]:
    """Figures of each kind, and of all of them; of `cascades` (bench/cascades.py) in turn with plain decoding, else of the artifact's.

    Every cascade keeps a controller of its own; the engine drafts as it did before afterwards. Raises MlsdcError, RequestError.
    """
    if not engine.drafting.levels:
        raise MlsdcError("this artifact has no drafting level: there is nothing to compare")
    own = Swap("", engine.drafting.level, engine.drafting.controller)
    swaps = [Swap.of(engine, text, max_nodes) for text in cascades] or [own]
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    plain = {kind: Side() for kind in kinds}
    batches = [(kind, of_kind[i : i + batch]) for kind in kinds for of_kind in [[p.prompt for p in prompts if p.kind == kind]]
               for i in range(0, len(of_kind), batch)]
    run(engine, batches[0][1], PLAIN, min(16, max_tokens), temperature, seed, Side())  # wakes everything up
    for kind, texts in batches:
        plain_s: list[float] = []
        for swap in swaps:
            swap.seconds = []
        for _ in range(rounds):
            plain_texts = run(engine, texts, PLAIN, max_tokens, temperature, seed, plain[kind])
            plain_s.append(plain[kind].seconds[-1])
            for swap in swaps:
                swap.use(engine)
                side = swap.sides.setdefault(kind, Side())
                spec_texts = run(engine, texts, None, max_tokens, temperature, seed, side)
                swap.different[kind] = swap.different.get(kind, 0) + sum(a != b for a, b in zip(plain_texts, spec_texts, strict=True))
                swap.seconds.append(side.seconds[-1])
        for swap in swaps:
            swap.times.setdefault(kind, []).append((median(plain_s), median(swap.seconds)))
    own.use(engine)
    return [found for swap in swaps for found in swap.figures(kinds, plain, prompts)]


@dataclass
class Swap:
    """A way to draft, and what came of it, by kind."""

    cascade: str
    level: Level | None
    controller: Controller
    sides: dict[str, Side] = field(default_factory=dict)
    times: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    different: dict[str, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    @staticmethod
    def of(engine: Engine, text: str, max_nodes: int) -> Swap:
        level = cascade_of(engine, text, max_nodes, "--cascade")
        engine.drafting.level = level
        engine.drafting.controller = Controller()
        engine.drafting.use(engine.device)
        return Swap(text, level, engine.drafting.controller)

    def use(self, engine: Engine) -> None:
        if engine.drafting.controller is not self.controller:
            engine.drafting.level = self.level
            engine.drafting.controller = self.controller

    def figures(self, kinds: Sequence[str], plain: dict[str, Side], prompts: Sequence[BenchPrompt]) -> list[KindFigures]:
        found = [figures(kind, plain[kind], self.sides[kind], self.times[kind], sum(p.kind == kind for p in prompts), self.different[kind])
                 for kind in kinds]
        if len(kinds) > 1:
            everything = [pair for kind in kinds for pair in self.times[kind]]
            found.append(figures("all", added(plain.values()), added(self.sides.values()), everything, len(prompts),
                                 sum(self.different.values())))
        return [replace(of_kind, cascade=self.cascade) for of_kind in found]


def figures(kind: str, plain: Side, spec: Side, times: Sequence[tuple[float, float]], prompts: int, different: int) -> KindFigures:
    ratio = sum(a for a, _ in times) / max(1e-12, sum(b for _, b in times))
    return KindFigures(kind, prompts, spec.length, spec.speed, plain.speed, ratio, 1e3 * spec.quantile(0.5), 1e3 * spec.quantile(0.99),
                       1e3 * plain.quantile(0.5), 1e3 * plain.quantile(0.99), different)


def added(sides: Any) -> Side:
    total = Side()
    for side in sides:
        total.seconds += side.seconds
        total.token_s += side.token_s
        total.tokens += side.tokens
        total.steps += side.steps
        total.stepped += side.stepped
    return total


def run(engine: Engine, texts: Sequence[Any], speculation: Speculation | None, max_tokens: int, temperature: float, seed: int,
        side: Side) -> list[list[int]]:
    """Decode a batch, add its figures to `side`, and return its tokens."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, speculation=speculation)
    last: dict[int, float] = {}
    came: list[tuple[float, int]] = []

    def on_token(number: int, delta: Delta) -> None:
        now = time.perf_counter()
        if not delta.token_ids:
            return
        came.append((now, len(delta.token_ids)))
        if number in last:
            side.token_s += [(now - last[number]) / len(delta.token_ids)] * len(delta.token_ids)
        last[number] = now
        if len(last) == len(texts) and "start" not in begun:
            begun["start"] = now

    begun: dict[str, float] = {}
    results = engine.generate(list(texts), params, on_token=on_token)
    start = begun.get("start", came[0][0])
    side.seconds.append(max(1e-9, came[-1][0] - start))
    side.stalled.append(stalled_s([when for when, _ in came if when >= start]))
    side.tokens += sum(count for when, count in came if when > start)
    side.steps += sum(result.statistics.steps for result in results)
    side.stepped += sum(len(result.token_ids) - 1 for result in results)
    return [result.token_ids for result in results]


def stalled_s(times: Sequence[float]) -> float:
    """Seconds that steps which ended at `times` took longer than the median one, counting those that took several times as long."""
    gaps = [gap for a, b in pairwise(times) if (gap := b - a) > SAME_STEP_S]
    usual = median(gaps) if gaps else 0.0
    return sum(gap - usual for gap in gaps if gap > STALLED * usual)
