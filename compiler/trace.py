"""One request as a trace that Perfetto and chrome://tracing open: steps, drafts, verifies with every kernel, commits, tokens.

Nothing in the runtime knows of it: the parts of a loaded engine are wrapped from outside. With `kernels` every launch runs by itself,
timed, so a verify is slower than it is when the whole list runs natively; the shares are what to read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mlsdc.runtime.admission import Prompt
from mlsdc.runtime.device.base import BoundProgram
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.request import Delta, Result
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.step import Array, Header

STEPS, TOKENS = 1, 2  # tracks
TRACKS = {STEPS: "engine", TOKENS: "tokens"}


@dataclass
class Recorder:
    """Events in the Trace Event Format, times in microseconds since `start`."""

    start: float = field(default_factory=time.perf_counter)
    events: list[dict[str, Any]] = field(default_factory=list)

    def now(self) -> float:
        return (time.perf_counter() - self.start) * 1e6

    @contextmanager
    def span(self, name: str, category: str) -> Iterator[dict[str, Any]]:
        """A span on the engine's track; what is put into the yielded mapping are its arguments."""
        args: dict[str, Any] = {}
        began = self.now()
        try:
            yield args
        finally:
            self.add(name, category, began, self.now() - began, args)

    def add(self, name: str, category: str, began: float, duration: float, args: Mapping[str, Any]) -> None:
        times = {"ts": round(began, 3), "dur": round(duration, 3)}
        self.events.append({"ph": "X", "name": name, "cat": category, **times, "pid": 1, "tid": STEPS, "args": dict(args)})

    def instant(self, name: str, args: Mapping[str, Any]) -> None:
        self.events.append({"ph": "i", "s": "t", "name": name, "cat": "token", "ts": round(self.now(), 3), "pid": 1, "tid": TOKENS,
                            "args": dict(args)})

    def counter(self, name: str, value: float) -> None:
        self.events.append({"ph": "C", "name": name, "ts": round(self.now(), 3), "pid": 1, "args": {name: value}})

    def of(self, category: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("cat") == category]


class TracedProgram(BoundProgram):
    """A program whose runs are spans, with a span for each launch if `kernels`."""

    def __init__(self, program: BoundProgram, span: str, recorder: Recorder, header: Array, kernels: bool) -> None:
        self.name = program.name
        self.program, self.span, self.recorder, self.header, self.kernels = program, span, recorder, header, kernels

    def run(self) -> None:
        with self.recorder.span(self.span, self.span.split()[0]) as args:
            args |= {"rows": int(self.header[Header.ROWS]), "logits": int(self.header[Header.OUT])}
            if not self.kernels:
                self.program.run()
                return
            at = self.recorder.now()
            for node, kernel, duration in self.profile():
                self.recorder.add(node, "kernel", at, duration, {"kernel": kernel})
                at += duration

    def tap(self, name: str) -> Array:
        return self.program.tap(name)

    def profile(self) -> list[tuple[str, str, float]]:
        return self.program.profile()


def instrument(engine: Engine, recorder: Recorder, kernels: bool) -> None:
    """Wrap the parts of the engine's step, on this one engine."""
    header = engine._memory.buffers.header
    level = engine.manifest.target_level.name
    drafter = engine.manifest.levels[0].name if len(engine.manifest.levels) > 1 else ""
    engine._forward = TracedProgram(engine._forward, f"verify {level}", recorder, header, kernels)
    engine._commit = TracedProgram(engine._commit, f"copy {level}", recorder, header, kernels)
    draft, commit, step = engine.drafting.draft, engine._commit_items, engine.step

    def traced_step() -> bool:
        with recorder.span("step", "step"):
            return step()

    def traced_draft(items: Any) -> None:
        if not any(item.budget for item in items):
            draft(items)
            return
        with recorder.span(f"draft {drafter}", "draft") as args:
            draft(items)
            args["nodes"] = sum(len(item.tree) for item in items)

    def traced_commit(items: Any) -> None:
        before = sum(item.request.statistics.accepted for item in items)
        with recorder.span("commit", "commit") as args:
            commit(items)
            args["accepted"] = sum(item.request.statistics.accepted for item in items) - before

    replace: Callable[..., None] = setattr  # a method of one object: not what a type checker expects, and what is wanted here
    replace(engine, "step", traced_step)
    replace(engine.drafting, "draft", traced_draft)
    replace(engine, "_commit_items", traced_commit)


def trace(engine: Engine, prompt: Prompt, params: SamplingParams, *, kernels: bool = True) -> dict[str, Any]:
    """Serve one prompt and return its trace, JSON-able; `otherData.summary` is what `mlsdc view` shows. Raises what `generate` raises."""
    recorder = Recorder()
    instrument(engine, recorder, kernels)
    count = 0

    def token(_: int, delta: Delta) -> None:
        nonlocal count
        count += len(delta.token_ids)
        if delta.token_ids:
            recorder.instant(delta.text.strip() or "·", {"ids": delta.token_ids, "text": delta.text})
            recorder.counter("tokens a step", len(delta.token_ids))

    (result,) = engine.generate([prompt], params, on_token=token)
    recorder.counter("tokens a step", 0)
    names = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"mlsdc {engine.manifest.model.name}"}}]
    names += [{"ph": "M", "name": "thread_name", "pid": 1, "tid": track, "args": {"name": name}} for track, name in TRACKS.items()]
    summary = summarise(recorder, result)
    return {"traceEvents": names + recorder.events, "displayTimeUnit": "ms", "otherData": {"summary": summary, "text": result.text}}


def summarise(recorder: Recorder, result: Result) -> dict[str, Any]:
    """Figures of the request, and means over its decode steps (those that drafted, or took one row)."""
    verifies = [event for event in recorder.of("verify") if event["args"]["rows"] <= 1 + max(1, max_tree(recorder))]
    kernels: dict[str, float] = {}
    for event in recorder.of("kernel"):
        kernels[event["args"]["kernel"]] = kernels.get(event["args"]["kernel"], 0.0) + event["dur"]
    drafts = recorder.of("draft")
    return dict(result.statistics.to_dict()) | {
        "tokens": len(result.token_ids), "prompt_tokens": len(result.prompt_token_ids),
        "total_ms": sum(event["dur"] for event in recorder.of("step")) / 1e3,
        "verify_ms": mean([event["dur"] for event in verifies]) / 1e3,
        "rows_per_step": mean([event["args"]["rows"] for event in verifies]),
        "draft_ms": mean([event["dur"] for event in drafts]) / 1e3,
        "kernels": {key: round(value, 1) for key, value in sorted(kernels.items(), key=lambda pair: -pair[1])},
    }


def max_tree(recorder: Recorder) -> int:
    return max((event["args"]["nodes"] for event in recorder.of("draft")), default=0)


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
