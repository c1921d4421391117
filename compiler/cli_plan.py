"""Plan a cascade without weights: which levels and which KV format would pay on a machine, by a roofline model and acceptance rates.

    mlsdc plan --shapes llama-3-70b,llama-3-8b,llama-3.2-1b --alpha table.yaml --hardware h100 --batch 1,8,64 --context 2k,32k

The first shape is the target, the others may draft for it, and for one another. The table says who accepts whose tokens, a token at a
time: `llama-3-70b: {llama-3-8b: 0.8, llama-3.2-1b: 0.65}`. Nothing is measured: times are what bandwidth and peak allow
(docs/speculation.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsdc.runtime.errors import MlsdcError

if TYPE_CHECKING:
    from mlsdc.compiler.planner import Decision, StepTime
    from mlsdc.compiler.roofline import Machine

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", required=True, metavar="A,B,..", help="the target, then who may draft, the larger first")
    parser.add_argument("--alpha", required=True, type=Path, metavar="FILE", help="YAML: acceptance rates by verifier and drafter")
    parser.add_argument("--hardware", required=True, metavar="NAME")
    parser.add_argument("--batch", default="1", metavar="N[,N]")
    parser.add_argument("--context", default="2k", metavar="N[,N]", help="tokens of each sequence; 2k is 2048")
    parser.add_argument("--weights", default="int8", metavar="NAME", help="of all levels: bf16, int8 (default) or int4")
    parser.add_argument("--kv", default="bf16,int8,int4", metavar="A,B", help="formats of the target's cache to compare")
    parser.add_argument("--max-nodes", type=int, default=8, metavar="N", help="most tokens the target verifies at once (8)")
    parser.add_argument("--json", metavar="FILE", help="everything as JSON; - prints it instead of the table")


@dataclass(frozen=True)
class Case:
    """One line: a batch, a context and a KV format, and what is best there. `need_bytes` of `memory_bytes`; `plan` is "does not fit" or
    the plan's text."""

    batch: int
    context: int
    kv: str
    need_bytes: float
    memory_bytes: float
    plan: str
    tokens_s: float
    token_ms: float
    plain_tokens_s: float
    dropped: Mapping[str, str]


def main(args: argparse.Namespace) -> int:
    from mlsdc.compiler.roofline import KV_BITS, MACHINES
    from mlsdc.compiler.roofline_shapes import SHAPES, WEIGHTS

    names = listed(args.shapes, SHAPES, "--shapes")
    machine = MACHINES[listed(args.hardware, MACHINES, "--hardware")[0]]
    listed(args.weights, WEIGHTS, "--weights")
    formats = listed(args.kv, KV_BITS, "--kv")
    if not 1 <= args.max_nodes <= 64:
        raise MlsdcError(f"--max-nodes: {args.max_nodes}, expected 1 to 64")
    alpha = read_alpha(args.alpha, names)
    cases = [case(names, alpha, machine, args.weights, batch, context, kv, args.max_nodes)
             for batch in numbers(args.batch, "--batch") for context in numbers(args.context, "--context") for kv in formats]
    if args.json:
        text = json.dumps([asdict(found) for found in cases], indent=1) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
            return 0
        Path(args.json).write_text(text, encoding="utf-8")
    print("\n".join(lines(names, machine, args.weights, cases)))
    return 0


def listed(text: str, known: Mapping[str, Any], option: str) -> list[str]:
    """Names with commas between them, each one known. Raises MlsdcError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise MlsdcError(f"{option}: '{name}' is not known; known are {', '.join(known)}")
    if not names:
        raise MlsdcError(f"{option}: expected names out of {', '.join(known)}")
    if len(set(names)) < len(names):
        raise MlsdcError(f"{option}: a name is given twice in '{text}'")
    return names


def numbers(text: str, option: str) -> list[int]:
    """`1,8` or `2k,32k`. Raises MlsdcError."""
    try:
        found = [int(part[:-1]) * 1024 if part.endswith("k") else int(part) for part in text.lower().split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise MlsdcError(f"{option}: '{text}', expected numbers such as 1,8 or 2k,32k")
    return found


def read_alpha(path: Path, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """verifier -> drafter -> rate. Raises MlsdcError for anything else, and where a drafter has no verifier."""
    import yaml

    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise MlsdcError(f"--alpha: {path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except yaml.YAMLError:
        raise MlsdcError(f"--alpha: {path} is not YAML") from None
    if not isinstance(raw, dict) or not all(isinstance(row, dict) for row in raw.values()):
        raise MlsdcError(f"--alpha: {path}: expected verifier: {{drafter: rate}}")
    for upper, row in raw.items():
        for lower, rate in row.items():
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
                raise MlsdcError(f"--alpha: {path}: {upper}.{lower}: {rate!r}, expected a rate from 0 to below 1")
    for i, name in enumerate(names[1:], 1):
        if not any(name in raw.get(upper, {}) for upper in names[:i]):
            raise MlsdcError(f"--alpha: {path}: nobody's rate for '{name}'; expected one of {', '.join(names[:i])} to have it")
    return raw


def case(names: Sequence[str], alpha: Mapping[str, Mapping[str, float]], machine: Machine, weights: str, batch: int, context: int,
         kv: str, max_nodes: int) -> Case:
    from mlsdc.compiler.planner import Candidate, Survival, choose

    target, *drafters = names
    steps = {name: step_time(name, weights, machine, batch, context, kv if name == target else "bf16") for name in names}
    need = {name: needed(name, weights, batch, context, kv if name == target else "bf16") for name in names}
    fits = [name for name in drafters if need[target] + need[name] <= machine.memory]
    candidates = [
        Candidate(name, {upper: Survival(float(alpha[upper][name])) for upper in names if name in alpha.get(upper, {})},
                  steps[name](batch) / batch, steps[name])
        for name in reversed(fits)]
    if need[target] > machine.memory:
        return Case(batch, context, kv, need[target], machine.memory, "does not fit", 0.0, 0.0, 0.0, {})
    decision = choose(candidates, target, steps[target], max_nodes=max_nodes, batch=batch)
    dropped = {**decision.dropped, **{name: f"does not fit beside the target: {need[name] / GIB:.1f} GiB" for name in drafters
                                      if name not in fits}}
    best, plain = decision.best.outcome.speed, plain_speed(decision)
    total = need[target] + sum(need[name] for name in decision.best.levels)
    return Case(batch, context, kv, total, machine.memory, str(decision.best), best, 1e3 * batch / best, plain, dropped)


def plain_speed(decision: Decision) -> float:
    return next(plan.outcome.speed for plan in decision.plans if not plan.levels)


def step_time(name: str, weights: str, machine: Machine, batch: int, context: int, kv: str) -> StepTime:
    """Seconds of a step of so many rows in all, of `batch` sequences of `context` tokens."""
    from mlsdc.compiler.roofline import KV_BITS, Load, step_costs, step_seconds
    from mlsdc.compiler.roofline_shapes import SHAPES, shape_graph
    from mlsdc.runtime.step import Limits

    graph = shape_graph(SHAPES[name], Limits(max(context, 64), 256, 8192, 8192, 63), weights)

    @cache
    def step(rows: int) -> float:
        return step_seconds(step_costs(graph, Load(rows, batch, context, kv_bits=KV_BITS[kv])), machine)

    return step


def needed(name: str, weights: str, batch: int, context: int, kv: str) -> float:
    """Bytes of a level's weights and of the caches of `batch` full sequences."""
    from mlsdc.compiler.graph import Weight
    from mlsdc.compiler.roofline import KV_BITS, weight_bytes
    from mlsdc.compiler.roofline_shapes import SHAPES, shape_graph
    from mlsdc.runtime.step import Limits

    shape = SHAPES[name]
    graph = shape_graph(shape, Limits(max(context, 64), 256, 8192, 8192, 63), weights)
    of_weights = sum(weight_bytes(node.type) for node in graph if isinstance(node.op, Weight))
    return of_weights + batch * context * shape.layers * 2 * shape.kv_heads * shape.head_dim * KV_BITS[kv] / 8


def lines(names: Sequence[str], machine: Machine, weights: str, cases: Sequence[Case]) -> Iterator[str]:
    yield f"{' <- '.join(names)}, {weights} weights, on {machine.name}: a roofline model, nothing of it measured"
    yield f"{'batch':>5} {'context':>8} {'kv':>6} {'GiB':>6}  {'tokens/s':>9} {'ms/token':>9} {'over off':>8}  plan"
    for found in cases:
        speed = f"{'':28}"
        if found.tokens_s:
            speed = f"{found.tokens_s:9.1f} {found.token_ms:9.2f} {found.tokens_s / found.plain_tokens_s:7.2f}x"
        yield f"{found.batch:5} {found.context:8} {found.kv:>6} {found.need_bytes / GIB:6.1f}  {speed}  {found.plan}"
        for name, why in found.dropped.items():
            yield f"{'':50}without {name}: {why}"
