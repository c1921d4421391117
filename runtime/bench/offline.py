"""`mlsdc bench throughput` and `latency`: the engine alone, with prompts for people, speculation on and off in turn."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from mlsdc.runtime.admission import Prompt
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.bench.report import Report
from mlsdc.runtime.bench.serve import SHARES, percentile
from mlsdc.runtime.bench.spread import Figure, by_round
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.request import Result
from mlsdc.runtime.sampling_params import SamplingParams, Speculation


def measure(verb: str, path: Path, threads: int, device: str, prompts: Sequence[str], modes: Sequence[str], *, rounds: int, requests: int,
            max_tokens: int) -> Report:
    """`throughput` serves a round's requests together, `latency` one after the other; both after a round that is thrown away."""
    artifact = Artifact.open(path)
    speeds: dict[str, list[float]] = {mode: [] for mode in modes}
    results: dict[str, list[list[Result]]] = {mode: [] for mode in modes}
    with Engine.load(path, threads=threads, device=device) as engine:
        chat = engine.tokenizer is not None and engine.tokenizer.has_chat_template
        for turn in range(rounds + 1):
            texts = list(itertools.islice(itertools.cycle(prompts), turn * requests, (turn + 1) * requests))
            asked: list[Prompt] = [[{"role": "user", "content": text}] if chat else text for text in texts]
            for mode in modes:
                params = SamplingParams(max_tokens=max_tokens, speculation=Speculation(enabled=mode == "on"))
                start = time.perf_counter()
                if verb == "throughput":
                    found = engine.generate(asked, params)
                else:
                    found = [result for one in asked for result in engine.generate([one], params)]
                seconds = time.perf_counter() - start
                if turn:
                    speeds[mode].append(sum(len(result.token_ids) for result in found) / seconds)
                    results[mode].append(found)
    figures = [figure for mode in modes for figure in _figures(f"speculation {mode}", speeds[mode], results[mode])]
    if len(modes) == 2:
        figures.append(Figure("on / off", "x", by_round(speeds["on"], speeds["off"]), "tokens/s, round by round"))
    return Report(verb, artifact.root.name, artifact.sha256, artifact.pick_target(device).name, threads, rounds, figures)


def _figures(name: str, speeds: Sequence[float], rounds: Sequence[Sequence[Result]]) -> list[Figure]:
    figures = [Figure(f"{name}: output", "tokens/s", tuple(speeds), "prompts and all")]
    firsts = [sorted(1e3 * (result.timings.time_to_first_token_s or 0) for result in found) for found in rounds]
    totals = [sorted(1e3 * (result.timings.total_s or 0) for result in found) for found in rounds]
    for kind, values in (("ttft", firsts), ("e2e", totals)):
        figures += [Figure(f"{name}: {kind} p{share * 100:g}", "ms", tuple(percentile(one, share) for one in values)) for share in SHARES]
    steps = [sum(result.statistics.steps for result in found) for found in rounds]
    accepted = [sum(result.statistics.accepted for result in found) for found in rounds]
    figures.append(Figure(f"{name}: tokens a step", "", tuple(1 + a / s if s else 0.0 for a, s in zip(accepted, steps, strict=True))))
    return figures
