"""What a KV-cache format costs: perplexity, KL divergence and top-1 agreement against the 16-bit cache, through the runtime that serves.

Every artifact is an engine of its own, and a window of the text is a request for the log probabilities of its prompt: chunks, pages, tails
and scales are those of serving. The logits are read after each run of the forward program; nothing else is special about such a step.
"""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.kv_window import window_of
from mlsdc.runtime.manifest import Manifest
from mlsdc.runtime.memory_plan import effective_bits
from mlsdc.runtime.request import Request
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from mlsdc.runtime.step import Array, Header, StepBuffers

CONTEXTS = (512, 4096, 32768)  # at which the bits of an element are told
TIMED_STEPS = 24
OFF = Speculation(enabled=False)


def evaluation_text() -> str:
    """The default text: `pydoc_data.topics`, which ships with Python, in sorted order, joined by blank lines."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def describe_text(text: str) -> dict[str, str]:
    """What is printed beside every figure: the text's hash and the Python it came with."""
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "Python": platform.python_version()}


@dataclass(frozen=True)
class Quality:
    """Means over `rows` rows of text: `kl` is KL(16-bit || this) in nats, `top1` how often both choose one token; `max_kl`: the worst row.

    `bits` are effective bits of a cached element by context, pages and tail included; `tokens_per_s` is plain decoding at a window's end.
    """

    name: str
    artifact: str
    sha256: str
    rows: int
    perplexity: float
    change: float  # of perplexity, relative
    kl: float
    max_kl: float
    top1: float
    bits: dict[int, float]
    tokens_per_s: float


class Scored:
    """One artifact under evaluation. Close it."""

    def __init__(self, path: str | Path, *, name: str = "", threads: int | None = None) -> None:
        self.path = Path(path)
        self.sha256 = Artifact.open(path).sha256
        self.engine = Engine.load(path, threads=threads)
        self.name = name or kv_name(self.engine.manifest)
        self._seen: list[tuple[int, Array]] = []
        self.engine.watch_forward(self._see)

    def _see(self, buffers: StepBuffers, logits: Array) -> None:
        count = int(buffers.header[Header.OUT])
        if count:
            self._seen.append((int(buffers.positions[buffers.out_rows[0]]), logits[:count]))

    def rows(self, tokens: Sequence[int]) -> Iterator[tuple[int, Array]]:
        """(first position, logits f32[rows, vocab]) of every row of `tokens`, in order; logits are valid until the next is asked for."""
        request = self.engine.submit(list(tokens), SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0, speculation=OFF))
        try:
            while not request.finished:
                self._seen.clear()
                if not self.engine.step():
                    raise MlsdcError(f"{self.path.name}: the engine has nothing to do; is it serving somebody else?")
                yield from self._seen
        finally:
            self.engine.abort(request)

    def begin(self, tokens: Sequence[int]) -> Request:
        """A request that decodes plainly after `tokens`, its prompt computed."""
        request = self.engine.submit(list(tokens), SamplingParams(max_tokens=TIMED_STEPS + 2, ignore_eos=True, speculation=OFF))
        while not request.num_output and not request.finished:
            self.engine.step()
        return request

    def close(self) -> None:
        self.engine.close()


def kv_name(manifest: Manifest) -> str:
    """The target's cache format, as a person names it."""
    kv, window = manifest.target_level.kv, window_of(manifest.target_level.params)
    name = kv.format if kv else "none"
    return name if window is None else f"{name} of {window.sinks} + {window.window} tokens"


def evaluate(reference: Scored, others: Sequence[Scored], tokens: Sequence[int], window: int, *, timed: bool = True) -> list[Quality]:
    """Every artifact's figures against the reference, which is the 16-bit cache. `tokens` are scored in windows from an empty cache.

    Raises RequestError for a window that an artifact was not compiled for, MlsdcError for vocabularies that differ.
    """
    sizes = {one.engine.manifest.model.vocab_size for one in (reference, *others)}
    if len(sizes) > 1:
        raise MlsdcError(f"vocabularies of {', '.join(map(str, sorted(sizes)))} tokens: artifacts of one model can be compared")
    (vocab,) = sizes
    sums = [np.zeros(4) for _ in others]  # nats, KL, agreement, largest KL
    nats = count = 0.0
    for start in range(0, len(tokens) - 1, window):
        part = tokens[start : start + window]
        blocks = aligned([one.rows(part[:-1]) for one in (reference, *others)])
        for first, views in blocks:
            wanted = log_softmax(views[0][:, :vocab])
            index = np.arange(len(wanted)), np.asarray(part[first + 1 : first + 1 + len(wanted)])
            nats -= float(wanted[index].sum())
            count += len(wanted)
            for total, view in zip(sums, views[1:], strict=True):
                given = log_softmax(view[:, :vocab])
                kl = (np.exp(wanted) * (wanted - given)).sum(axis=1)
                total[:3] += -given[index].sum(), kl.sum(), (wanted.argmax(1) == given.argmax(1)).sum()
                total[3] = max(total[3], kl.max())
    rates = speeds(others, list(tokens[:window])) if timed else [math.nan] * len(others)
    return [
        Quality(
            one.name, one.path.name, one.sha256, int(count), math.exp(total[0] / count), math.expm1((total[0] - nats) / count),
            float(total[1] / count), float(total[3]), float(total[2] / count), bits(one.engine.manifest), rate)
        for one, total, rate in zip(others, sums, rates, strict=True)]


def aligned(scorers: Sequence[Iterator[tuple[int, Array]]]) -> Iterator[tuple[int, list[Array]]]:
    """(first position, one block of logits each) over the same rows of all, whatever chunks each of them comes in."""
    blocks = [next(scorer, None) for scorer in scorers]
    while all(block is not None for block in blocks):
        held = [block for block in blocks if block is not None]
        start = max(first for first, _ in held)
        end = min(first + len(rows) for first, rows in held)
        yield start, [rows[start - first : end - first] for first, rows in held]
        blocks = [block if block[0] + len(block[1]) > end else next(scorer, None) for block, scorer in zip(held, scorers, strict=True)]
    for scorer, block in zip(scorers, blocks, strict=True):
        if block is not None or next(scorer, None) is not None:
            raise MlsdcError("the artifacts scored different numbers of rows")


def log_softmax(logits: Array) -> Array:
    """Of each row, in f64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


def speeds(scored: Sequence[Scored], tokens: list[int]) -> list[float]:
    """Tokens a second of plain decoding up to the end of `tokens`, batch 1, the artifacts' steps in turn; NaN for too short a text."""
    prompt = tokens[: len(tokens) - TIMED_STEPS - 2]
    if len(prompt) < 1:
        return [math.nan] * len(scored)
    requests = [one.begin(prompt) for one in scored]
    times: list[list[float]] = [[] for _ in scored]
    for _ in range(TIMED_STEPS):
        for one, taken in zip(scored, times, strict=True):
            start = time.perf_counter()
            one.engine.step()
            taken.append(time.perf_counter() - start)
    for one, request in zip(scored, requests, strict=True):
        one.engine.abort(request)
    return [1 / median(taken) for taken in times]


def bits(manifest: Manifest) -> dict[int, float]:
    """Of a cached element by context; with a window those that are left are told over the whole context's elements."""
    kv, window = manifest.target_level.kv, window_of(manifest.target_level.params)
    return {context: effective_bits(kv, context, window) for context in CONTEXTS} if kv else {}


def table(found: Sequence[Quality]) -> Iterator[str]:
    """The figures, a line a format."""
    contexts = list(found[0].bits)
    heads = " ".join(f"{'at ' + context_name(context):>8}" for context in contexts)
    yield f"{'cache':18} {heads}   {'ppl':>8} {'change':>8} {'KL':>9} {'worst KL':>9} {'top-1':>7} {'tokens/s':>9}"
    for one in found:
        cells = " ".join(f"{one.bits[context]:8.2f}" for context in contexts)
        yield f"{one.name:18} {cells}   {one.perplexity:8.3f} {one.change:+8.2%} {one.kl:9.2e} {one.max_kl:9.2e} {one.top1:7.2%} " \
              f"{one.tokens_per_s:9.1f}"


def context_name(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def to_json(found: Sequence[Quality]) -> list[dict[str, Any]]:
    return [vars(one) for one in found]
