"""The four benchmarks. Each interleaves its cases with the streaming read and, if there is one, the peer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.bench.peer import LlamaBench
from mlsdc.runtime.bench.report import OpTime, Report
from mlsdc.runtime.bench.rig import Rig
from mlsdc.runtime.bench.spread import Figure, by_round, interleave
from mlsdc.runtime.bench.startup import start_up
from mlsdc.runtime.bench.traffic import Traffic

GB = 1e9
STREAM, PEER = "stream", "peer"
PROFILED_RUNS = 5


def decode(rig: Rig, *, tokens: int = 64, context: int = 1, rounds: int = 7, steps: int = 32, peer: LlamaBench | None = None,
           profile: bool = False) -> Report:
    """One sequence, token by token, without drafts: through the engine, and the program alone halfway through those tokens."""
    middle = context + tokens // 2

    def engine() -> float:
        result = rig.generate(context, tokens)
        first, total = result.timings.time_to_first_token_s, result.timings.total_s
        assert first is not None and total is not None
        return (len(result.token_ids) - 1) / (total - first)

    def program() -> float:
        rig.fill(middle)
        rig.set_rows(middle, 1, drafted=False)
        return rig.seconds(steps)

    found = interleave({STREAM: rig.stream.run, "engine": engine, "program": program, **peer_case(peer, generate=tokens)}, rounds)
    read = rig.traffic(1, middle + 1)
    figures = [
        Figure("decode", "tokens/s", found["engine"], f"{tokens} tokens after {context}, engine and all"),
        *ratio("decode", found, "engine", peer),
        *step_figures("step", found["program"], found[STREAM], read),
        stream_figure(found[STREAM]),
    ]
    return report("decode", rig, rounds, figures, read=read, peer=peer, profile=profiled(rig) if profile else ())


def prefill(rig: Rig, *, lengths: Sequence[int] = (128, 1024), rounds: int = 5, peer: LlamaBench | None = None,
            profile: bool = False) -> Report:
    """Prompts of random tokens to their first token, through the engine."""
    cases: dict[str, Callable[[], float]] = {STREAM: rig.stream.run}
    for length in lengths:
        cases[f"{length}"] = lambda length=length: prompt_speed(rig, length)  # type: ignore[misc]
        cases |= peer_case(peer, prompt=length, name=f"{PEER} {length}")
    found = interleave(cases, rounds)
    figures = []
    for length in lengths:
        figures.append(Figure(f"prefill {length}", "tokens/s", found[f"{length}"], "to the first token, engine and all"))
        figures += ratio(f"prefill {length}", found, f"{length}", peer, f"{PEER} {length}")
    figures.append(stream_figure(found[STREAM]))
    if profile:
        rig.fill(0)
        rig.set_rows(0, min(lengths[0], rig.limits.max_num_batched_tokens), drafted=False)
    return report("prefill", rig, rounds, figures, peer=peer, profile=profiled(rig) if profile else ())


def prompt_speed(rig: Rig, length: int) -> float:
    """Prompt tokens a second."""
    start = time.perf_counter()
    rig.generate(length, 1)
    return length / (time.perf_counter() - start)


def verify(rig: Rig, *, contexts: Sequence[int] = (256, 1024), rows: Sequence[int] = (1, 2, 4, 8), rounds: int = 7, steps: int = 16,
           profile: bool = False) -> Report:
    """The program alone: chains of drafted rows against one plain row, at several contexts."""
    cases: dict[str, Callable[[], float]] = {STREAM: rig.stream.run}
    for context in contexts:
        for count in dict.fromkeys((1, *rows)):
            cases[f"{context} {count}"] = lambda context=context, count=count: verify_seconds(rig, context, count, steps)  # type: ignore[misc]
    rig.fill(max(contexts))
    found = interleave(cases, rounds)
    figures = []
    for context in contexts:
        one = found[f"{context} 1"]
        figures += step_figures(f"context {context}, 1 row", one, found[STREAM], rig.traffic(1, context + 1))
        for count in rows:
            if count > 1:
                many = found[f"{context} {count}"]
                figures.append(Figure(f"context {context}, {count} rows", "ms", tuple(1e3 * x for x in many)))
                figures.append(Figure(f"context {context}, {count} rows / 1 row", "x", by_round(many, one)))
    figures.append(stream_figure(found[STREAM]))
    if profile:
        rig.set_rows(contexts[0], max(rows), drafted=max(rows) > 1)
    return report("verify", rig, rounds, figures, profile=profiled(rig) if profile else ())


def verify_seconds(rig: Rig, context: int, rows: int, steps: int) -> float:
    rig.set_rows(context, rows, drafted=rows > 1)
    return rig.seconds(steps)


def startup(path: Path, threads: int, *, rounds: int = 5) -> Report:
    """Import, open, and the first token of a fresh process, files warm."""
    artifact = Artifact.open(path)
    runs = [start_up(path, threads) for _ in range(rounds + 1)][1:]
    notes = {"import": "import mlsdc.runtime", "open": "Engine.load", "first token": "Engine.load and one token", "all": "all of it"}
    figures = [Figure(name, "s", tuple(run[name] for run in runs), note) for name, note in notes.items()]
    return Report("startup", artifact.root.name, artifact.sha256, artifact.pick_target().name, threads, rounds, figures)


def step_figures(name: str, seconds: tuple[float, ...], stream: tuple[float, ...], read: Traffic) -> list[Figure]:
    """A step's time, the bandwidth its bytes make of it, and that against the streaming read of the same round."""
    speed = tuple(read.total / s for s in seconds)
    return [
        Figure(name, "ms", tuple(1e3 * s for s in seconds), "the program alone"),
        Figure(f"{name}: bytes / time", "GB/s", tuple(x / GB for x in speed), f"{read.total / 1e6:.1f} MB a step"),
        Figure(f"{name}: of the streaming read", "x", by_round(speed, stream)),
    ]


def stream_figure(stream: tuple[float, ...]) -> Figure:
    return Figure("streaming read", "GB/s", tuple(x / GB for x in stream), "the same threads, the same rounds")


def peer_case(peer: LlamaBench | None, *, prompt: int = 0, generate: int = 0, name: str = PEER) -> Mapping[str, Callable[[], float]]:
    return {} if peer is None else {name: lambda: peer.tokens_per_second(prompt, generate)}


def ratio(name: str, found: Mapping[str, tuple[float, ...]], ours: str, peer: LlamaBench | None, theirs: str = PEER) -> list[Figure]:
    """The peer's speed, and ours against it, round by round."""
    if peer is None:
        return []
    ratios = by_round(found[ours], found[theirs])
    return [Figure(f"{name}, peer", "tokens/s", found[theirs], peer.name), Figure(f"{name}, ours / peer", "x", ratios)]


def profiled(rig: Rig) -> tuple[OpTime, ...]:
    """Time by kernel of the step that is set, the most expensive first; the median of a few runs for each launch."""
    runs = [rig.forward.profile() for _ in range(PROFILED_RUNS + 1)][1:]
    kernels: dict[str, list[float]] = {}
    for launch in zip(*runs, strict=True):
        kernels.setdefault(launch[0][1], []).append(median(time for _, _, time in launch))
    ops = [OpTime(kernel, len(times), sum(times)) for kernel, times in kernels.items()]
    return tuple(sorted(ops, key=lambda op: -op.microseconds))


def report(verb: str, rig: Rig, rounds: int, figures: Sequence[Figure], *, read: Traffic | None = None, peer: LlamaBench | None = None,
           profile: Sequence[OpTime] = ()) -> Report:
    threads, name = rig.stream.device.threads, "" if peer is None else peer.name
    return Report(verb, rig.artifact.root.name, rig.artifact.sha256, rig.device.name, threads, rounds, figures, read, name, profile)
