"""Training of heads on a frozen target: hidden states are streamed through a bounded window of batches, never stored.

Each new batch of text passes the target once and enters the window; `replay` optimiser steps follow, each on a batch of the window: Muon
(momentum, then the nearest orthogonal matrix) for matrices, AdamW for vectors. All randomness comes from (seed, step), so a run that is
stopped continues from its checkpoint to the same bytes: the window's batches are computed again.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mlsdc.compiler.errors import HeadError
from mlsdc.compiler.heads.data import Sample
from mlsdc.compiler.heads.frozen import FrozenTarget
from mlsdc.compiler.heads.modules import Batch, Head, Tensor


@dataclass(frozen=True)
class TrainOptions:
    """`batch_tokens` of padded text a batch, `window` batches are kept, each text is streamed `epochs` times. `soft`: share of the loss
    that compares distributions with the target's. `init`: sha256 of the file of heads that training goes on from, if it does."""

    seed: int = 0
    epochs: int = 1
    batch_tokens: int = 2048
    window: int = 32
    replay: int = 4
    lr: float = 4e-3
    warmup: int = 20
    held_out: int = 48
    eval_every: int = 20
    patience: int = 4
    clip: float = 1.0
    soft: float = 0.0
    init: str = ""


@dataclass
class Point:
    """One line of the curves. `acceptance[d]`: share of held-out tokens guessed right at depth d; `length`: tokens a chain would bring."""

    streamed: int
    tokens: int
    seconds: float
    loss: float
    acceptance: list[float]
    length: float


Report = Callable[[Point], None]


def chain_length(acceptance: Sequence[float]) -> float:
    """1 + a1 + a1 a2 + ...: tokens a target step if each depth's acceptance holds given the one before."""
    total, path = 1.0, 1.0
    for rate in acceptance:
        path *= rate
        total += path
    return total


class Trainer:
    """One head on one target. `draft` i64[vocab]: draft id of a token, -1 outside of the draft vocabulary."""

    def __init__(self, head: Head, target: FrozenTarget, taps: tuple[int, ...], samples: Sequence[Sample], draft: Tensor,
                 options: TrainOptions, checkpoint: Path | None = None, report: Report = lambda _: None, autocast: bool = True) -> None:
        self.head, self.target, self.taps, self.draft, self.options = head, target, taps, draft, options
        self.checkpoint, self.report, self.autocast = checkpoint, report, autocast
        head.soft = options.soft
        order = list(range(len(samples)))
        random.Random(options.seed).shuffle(order)
        held = min(options.held_out, max(1, len(samples) // 10))
        self.held = [samples[i] for i in order[:held]]
        self.train = [samples[i] for i in order[held:]] or self.held
        self.plan = [batch for epoch in range(options.epochs) for batch in batches(self.train, options.batch_tokens, options.seed, epoch)]
        matrices, vectors = ([p for p in head.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(
            matrices, lr=options.lr, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw")]
        if vectors:
            self.optimizers.append(torch.optim.AdamW(vectors, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0))
        self.window: deque[Batch] = deque(maxlen=options.window)
        self.curve: list[Point] = []
        self.streamed = self.tokens = self.stale = 0
        self.seconds = 0.0
        self.losses: list[float] = []
        self.best: dict[str, Tensor] = {}
        self.best_length = 0.0

    @property
    def total_steps(self) -> int:
        return max(1, len(self.plan) * self.options.replay)

    @property
    def done(self) -> bool:
        return self.streamed >= len(self.plan) or self.stale >= self.options.patience

    def advance(self, batch: Batch) -> None:
        """Take batch number `streamed` of the plan into the window and learn from the window."""
        options = self.options
        started = time.perf_counter()
        self.window.append(batch)
        self.tokens += int(batch.counted.sum())
        rng = random.Random(f"{options.seed} {self.streamed}")
        for i in range(options.replay):
            picked = self.window[-1] if i == 0 else self.window[rng.randrange(len(self.window))]
            self.losses.append(self.step(picked, self.streamed * options.replay + i))
        self.streamed += 1
        self.seconds += time.perf_counter() - started
        if self.streamed % options.eval_every == 0 or self.streamed == len(self.plan):
            self.measure()
            self.save()

    def step(self, batch: Batch, number: int) -> float:
        options = self.options
        rise = min(1.0, (number + 1) / max(1, options.warmup))
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, number / self.total_steps)))
        self.head.train()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = options.lr * rise * (0.02 + 0.98 * fall)
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss, _ = self.head.losses(batch)
        if not torch.isfinite(loss):
            raise HeadError(f"training: the loss is {loss.item()} at step {number}: lower --lr (it is {options.lr:g})")
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), options.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.item()

    @torch.no_grad()
    def measure(self) -> None:
        """Held-out acceptance: one more point of the curves."""
        self.head.eval()
        sums: list[list[int]] = []
        for samples in batches(self.held, self.options.batch_tokens, 0, 0):
            batch = self.load(samples)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                _, counts = self.head.losses(batch)
            sums = sums or [[0, 0] for _ in counts]
            for total, (right, counted) in zip(sums, counts, strict=True):
                total[0] += right
                total[1] += counted
        acceptance = [right / max(1, counted) for right, counted in sums]
        length = chain_length(acceptance)
        mean = sum(self.losses) / max(1, len(self.losses))
        self.losses = []
        self.curve.append(Point(self.streamed, self.tokens, round(self.seconds, 1), mean, acceptance, length))
        self.stale += 1
        if length > self.best_length:
            self.best_length, self.stale = length, 0
            self.best = {name: value.clone() for name, value in self.head.tensors().items()}
        self.report(self.curve[-1])

    def load(self, samples: Sequence[Sample]) -> Batch:
        length = max(len(sample.tokens) for sample in samples)
        tokens = torch.zeros(len(samples), length, dtype=torch.int64)
        counted = torch.zeros(len(samples), length, dtype=torch.bool)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample.tokens)] = torch.tensor(sample.tokens)
            counted[row, sample.start : len(sample.tokens)] = True
        labels = torch.where(counted, self.draft[tokens], -1)
        if self.options.soft == 0:
            return Batch(tokens, self.target.hidden(tokens, self.taps), labels, counted)
        everything = self.target.hidden(tokens, (*self.taps, self.target.layers))
        width = everything.shape[-1] // (len(self.taps) + 1)
        return Batch(tokens, everything[..., :-width], labels, counted, everything[..., -width:])

    # --- checkpoints ---

    def save(self) -> None:
        """Everything `resume` needs, written aside and renamed."""
        if self.checkpoint is None:
            return
        state = {
            "options": asdict(self.options), "head": self.head.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers],
            "generators": {name: g.get_state() for name, g in self._generators().items()}, "best": self.best,
            "best_length": self.best_length, "curve": json.dumps([asdict(point) for point in self.curve]), "streamed": self.streamed,
            "tokens": self.tokens, "stale": self.stale, "seconds": self.seconds, "losses": self.losses}
        partial = self.checkpoint.with_name(self.checkpoint.name + ".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    def resume(self, *, window: bool = True) -> bool:
        """Continue from the checkpoint, if there is one; without `window` only to look at it. Raises HeadError for one of another run."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return False
        try:
            state: dict[str, Any] = torch.load(self.checkpoint, weights_only=True)
            if state["options"] != asdict(self.options):
                changed = next(key for key, value in asdict(self.options).items() if state["options"].get(key) != value)
                raise HeadError(f"{self.checkpoint.name}: was written with {changed} {state['options'].get(changed)}, "
                                f"now it is {getattr(self.options, changed)}: give the same options or remove it")
            self.head.load_state_dict(state["head"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        except HeadError:
            raise
        except Exception as error:  # whatever torch says of a file that is not this run's
            first = (str(error).strip().splitlines() or [""])[0]
            raise HeadError(f"{self.checkpoint.name}: not a checkpoint of this run ({first}): remove it to start anew") from None
        for name, generator in self._generators().items():
            generator.set_state(state["generators"][name])
        self.best, self.best_length, self.stale = state["best"], state["best_length"], state["stale"]
        self.curve = [Point(**point) for point in json.loads(state["curve"])]
        self.streamed, self.tokens, self.seconds, self.losses = state["streamed"], state["tokens"], state["seconds"], state["losses"]
        for samples in self.plan[max(0, self.streamed - self.options.window) : self.streamed] if window else ():
            self.window.append(self.load(samples))
        return True

    def _generators(self) -> dict[str, torch.Generator]:
        return {name: value for name, value in vars(self.head).items() if isinstance(value, torch.Generator)}


def run(trainers: Sequence[Trainer], should_stop: Callable[[], bool] = lambda: False) -> bool:
    """Train heads of one target on one plan, side by side: each batch of text passes the target once for all of them.

    Each goes on to the plan's end or until its held-out acceptance stops growing. False if `should_stop` ended it; checkpoints are written.
    """
    while left := [trainer for trainer in trainers if not trainer.done]:
        if should_stop():
            for trainer in left:
                trainer.save()
            return False
        number = min(trainer.streamed for trainer in left)
        batch = left[0].load(left[0].plan[number])
        for trainer in left:
            if trainer.streamed == number:
                trainer.advance(batch)
    for trainer in trainers:
        if not trainer.best:
            trainer.measure()
    return True


def batches(samples: Sequence[Sample], batch_tokens: int, seed: int, epoch: int) -> list[list[Sample]]:
    """Samples in random order, those of about the same length together, at most `batch_tokens` with padding (but at least one)."""
    rng = random.Random(f"{seed} {epoch}")
    order = list(samples)
    rng.shuffle(order)
    made: list[list[Sample]] = []
    for start in range(0, len(order), 64):
        current: list[Sample] = []
        for sample in sorted(order[start : start + 64], key=lambda s: len(s.tokens)):
            if current and (len(current) + 1) * len(sample.tokens) > batch_tokens:
                made.append(current)
                current = []
            current.append(sample)
        made.append(current)
    rng.shuffle(made)
    return made
