"""What a step costs beside the kernels, what batching brings, and what a known prefix saves.

    python -m mlsdc.runtime.bench.host build/smollm2.mlsdc --threads 2

Host work of a step = the whole step minus the time inside the device's programs. Batch sizes and modes take turns, so that
a machine that slows down slows all of them; figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mlsdc.runtime.device.base import BoundProgram
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.sampling_params import SamplingParams, Speculation

SETTLE, STEPS = 3, 24  # steps of a round that are not timed, and those that are


@dataclass(frozen=True)
class Round:
    """One batch size, decoding. Microseconds a step, and tokens a second of all requests together."""

    host_us: float
    step_us: float
    tokens_per_s: float


class _Watch:
    """Adds up the time inside a program."""

    def __init__(self, program: BoundProgram) -> None:
        self.seconds = 0.0
        self._run = program.run
        program.run = self  # type: ignore[method-assign]

    def __call__(self) -> None:
        start = time.perf_counter()
        self._run()
        self.seconds += time.perf_counter() - start


def decode_round(engine: Engine, watches: Sequence[_Watch], prompts: Sequence[list[int]], params: SamplingParams) -> Round:
    """Time STEPS steps in which every one of `prompts` decodes, then abort them."""
    requests = [engine.submit(prompt, params) for prompt in prompts]
    while not all(request.num_output for request in requests):
        engine.step()
    for _ in range(SETTLE):
        engine.step()
    tokens = sum(request.num_output for request in requests)
    inside = sum(watch.seconds for watch in watches)
    start = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    seconds = time.perf_counter() - start
    inside = sum(watch.seconds for watch in watches) - inside
    tokens = sum(request.num_output for request in requests) - tokens
    for request in requests:
        engine.abort(request)
    return Round((seconds - inside) / STEPS * 1e6, seconds / STEPS * 1e6, tokens / seconds)


def decode_table(engine: Engine, batches: Sequence[int], rounds: int) -> dict[tuple[str, int], Round]:
    """Medians by (speculation, batch)."""
    watches = [_Watch(program) for program in engine._memory.programs.values()]
    rng = random.Random(0)
    vocab = engine.manifest.model.vocab_size
    found: dict[tuple[str, int], list[Round]] = {}
    for _ in range(rounds):
        for enabled in (False, True):
            for batch in batches:
                prompts = [[rng.randrange(vocab) for _ in range(16)] * 4 for _ in range(batch)]
                params = SamplingParams(speculation=Speculation(enabled=enabled), ignore_eos=True)
                found.setdefault(("on" if enabled else "off", batch), []).append(decode_round(engine, watches, prompts, params))
    return {key: _medians(values) for key, values in found.items()}


def _medians(rounds: Sequence[Round]) -> Round:
    return Round(median(r.host_us for r in rounds), median(r.step_us for r in rounds), median(r.tokens_per_s for r in rounds))


def prefix_ratio(engine: Engine, num_tokens: int, rounds: int) -> tuple[float, float]:
    """Seconds to the first token of a new prompt of `num_tokens`, and of one that differs in its last tokens only; medians."""
    rng = random.Random(1)
    vocab = engine.manifest.model.vocab_size
    first: list[float] = []
    second: list[float] = []
    for _ in range(rounds):
        prefix = [rng.randrange(vocab) for _ in range(num_tokens - 8)]
        for times in (first, second):
            (result,) = engine.generate([[*prefix, *(rng.randrange(vocab) for _ in range(8))]], SamplingParams(max_tokens=1))
            times.append(result.timings.time_to_first_token_s or 0.0)
    return median(first), median(second)


def main() -> int:
    parser = argparse.ArgumentParser(description="Host work per step, tokens per second by batch size, and the time a known prefix saves.")
    parser.add_argument("artifact")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prefix", type=int, default=2000, help="tokens")
    args = parser.parse_args()
    try:
        with Engine.load(args.artifact, threads=args.threads) as engine:
            if engine.tokenizer is not None:
                engine.tokenizer.vocabulary.fill()  # as the server does
            most = engine.scheduler.max_running
            batches = [batch for batch in (1, 2, 4, 8, 16) if batch <= most]
            table = decode_table(engine, batches, args.rounds)
            known = prefix_ratio(engine, min(args.prefix, engine.manifest.limits.max_model_len - 1), max(1, args.rounds // 2))
    except MlsdcError as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    print("speculation  batch  host us/step  step us  tokens/s")
    for (mode, batch), r in table.items():
        print(f"{mode:>11} {batch:6} {r.host_us:13.0f} {r.step_us:8.0f} {r.tokens_per_s:9.1f}")
    for mode in ("off", "on"):
        one, all_ = table[mode, 1], table[mode, batches[-1]]
        if batches[-1] > 1:
            each = (all_.host_us - one.host_us) / (batches[-1] - 1)
            print(f"speculation {mode}: {each:.1f} us of host work for each request more; "
                  f"batch {batches[-1]} brings {all_.tokens_per_s / one.tokens_per_s:.2f}x the tokens of batch 1")
    print(f"first token after a prompt of {args.prefix}: {known[0]:.3f} s, its prefix known {known[1]:.3f} s ({known[1] / known[0]:.3f}x)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
