"""Predict a step's time on a GPU from bytes and operations: where it goes, and what KV formats and cascade plans would do to it.

ARTIFACT is a folder, or a shape that needs no weights: llama-3-8b, llama-3-70b, smollm2-135m. Nothing of this was measured on a card.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

from mlsdc.compiler.graph import Graph, Weight
from mlsdc.compiler.roofline import KV_BITS, MACHINES, Cost, Load, Machine, step_costs, step_seconds, weight_bytes
from mlsdc.compiler.roofline_shapes import SHAPES, WEIGHTS, shape_graph
from mlsdc.compiler.types import KvType
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.step import SCRATCH_SLOTS, Limits

CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
BAR = 40
GOALS = list(itertools.product((1, 8, 64), (2048, 32768)))  # batch, context
GOAL_NODES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", help="an artifact, or a shape: " + ", ".join(SHAPES))
    parser.add_argument("--machine", default="h100", choices=sorted(MACHINES))
    parser.add_argument("--context", type=positive, default=8192, metavar="TOKENS", help="cached tokens of each sequence (default 8192)")
    parser.add_argument("--batch", type=positive, default=1, metavar="SEQS", help="sequences of a step (default 1)")
    parser.add_argument("--nodes", type=nodes, default=0, metavar="N", help="drafted nodes that each sequence verifies (default 0)")
    parser.add_argument("--acceptance", type=rate, default=0.7, metavar="RATE",
                        help="assumed acceptance rate of a chain's nodes, for the cascade plans (default 0.7)")
    parser.add_argument("--weights", choices=sorted(WEIGHTS), help="of a shape (default int8)")
    parser.add_argument("--kv", choices=sorted(KV_BITS), help="stands for the artifact's own KV format")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise MlsdcError(f"'{text}': expected a whole number of at least 1")
    return int(text)


def nodes(text: str) -> int:
    if not text.isdecimal() or int(text) >= SCRATCH_SLOTS:
        raise MlsdcError(f"--nodes: '{text}', expected 0 to {SCRATCH_SLOTS - 1}")
    return int(text)


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise MlsdcError(f"--acceptance: '{text}', expected at least 0 and less than 1")
    return value


def main(args: argparse.Namespace) -> int:
    machine = MACHINES[args.machine]
    graph, what = open_graph(args.artifact, args.weights, args.batch * (1 + args.nodes))
    load = Load(args.batch * (1 + args.nodes), args.batch, args.context, kv_bits=KV_BITS[args.kv] if args.kv else 0.0)
    for line in report(graph, what, machine, load, args.acceptance, args.kv):
        print(line)
    if args.artifact in SHAPES:
        for line in goals(args.artifact, machine, args.acceptance):
            print(line)
    return 0


def open_graph(name: str, weights: str | None, rows: int) -> tuple[Graph, str]:
    """The target's row program and what it is of. Raises MlsdcError."""
    if name in SHAPES:
        limits = Limits(max(CONTEXTS), 256, max(512, rows), max(512, rows), SCRATCH_SLOTS - 1)
        return shape_graph(SHAPES[name], limits, weights or "int8"), f"{name}, {weights or 'int8'} weights"
    if weights:
        raise MlsdcError("--weights: is for shapes; an artifact has its own")
    from mlsdc.compiler.text_parse import parse_graph
    from mlsdc.runtime.artifact import Artifact

    artifact = Artifact.open(name)
    level = artifact.manifest.target_level.name
    text = artifact.path(f"graph/{level}.ir").read_text(encoding="utf-8")
    first, *_ = text.split("\ngraph ")
    return parse_graph(first, f"graph/{level}.ir"), f"{artifact.manifest.model.name}, {artifact.manifest.model.weights_dtype} weights"


def report(graph: Graph, what: str, machine: Machine, load: Load, acceptance: float, kv: str | None = None) -> Iterator[str]:
    cache = next(node.type for node in graph.inputs() if isinstance(node.type, KvType))
    costs = step_costs(graph, load)
    total = step_seconds(costs, machine)
    reached = sum(cost.bytes for cost in costs) / total / machine.bandwidth
    yield f"{what} on {machine.name}: {machine.bandwidth / 1e9:,.0f} GB/s, {machine.memory / 2**30:.0f} GiB"
    yield "Predicted from bytes and operations, never measured on a card."
    yield (f"step        {load.rows} rows of {load.seqs} sequences at {load.context:,} tokens, KV {kv or cache.format}: "
           f"{total * 1e3:.2f} ms, {reached:.0%} of the bandwidth")
    yield ""
    yield f"{'op':18}{'launches':>9}{'ms':>9}{'part':>7}{'MB':>10}{'GFLOP':>9}  bound by"
    yield from by_op(costs, machine, total)
    yield ""
    yield f"{'KV':12}{'bits':>6}{'KiB/token':>11}{'ms':>8}{'tokens/s':>10}{'fit':>7}  sequences of {load.context:,} tokens"
    yield from by_format(graph, cache, machine, load)
    yield ""
    yield f"plan        chain of n drafted tokens, each accepted with {acceptance:.0%} (assumed); drafting itself is not counted"
    yield f"{'n':>4}{'step ms':>9}{'x off':>7}{'tokens':>8}{'tokens/s':>10}{'gain':>7}"
    yield from by_plan(graph, machine, load, acceptance)
    yield ""
    yield f"tokens/s of {load.seqs} sequence{'s' if load.seqs > 1 else ''} by context (plain decoding)"
    yield from plot(graph, cache, machine, load)


def by_op(costs: list[Cost], machine: Machine, total: float) -> Iterator[str]:
    """A line an op, the slowest first."""
    groups: dict[str, list[Cost]] = defaultdict(list)
    for cost in costs:
        groups[cost.op].append(cost)
    for op, members in sorted(groups.items(), key=lambda item: -step_seconds(item[1], machine)):
        seconds = step_seconds(members, machine)
        bounds = Counter[str]()
        for cost in members:
            bounds[bound(cost, machine)] += 1
        moved, done = sum(cost.bytes for cost in members), sum(cost.operations for cost in members)
        yield (f"{op:18}{sum(cost.launches for cost in members):9}{seconds * 1e3:9.3f}{seconds / total:7.1%}"
               f"{moved / 1e6:10.1f}{done / 1e9:9.1f}  {bounds.most_common(1)[0][0]}")


def bound(cost: Cost, machine: Machine) -> str:
    times = {
        "memory": cost.bytes / machine.bandwidth / machine.reach,
        "tensor cores": cost.operations / machine.peaks[cost.unit] / machine.compute_reach,
        "launches": cost.launches * machine.launch_s,
    }
    return max(times, key=lambda name: times[name])


def by_format(graph: Graph, cache: KvType, machine: Machine, load: Load) -> Iterator[str]:
    weights = sum(weight_bytes(node.type) for node in graph if isinstance(node.op, Weight))
    plain = replace(load, rows=load.seqs)
    for name, bits in sorted(KV_BITS.items(), key=lambda item: -item[1]):
        seconds = step_seconds(step_costs(graph, replace(plain, kv_bits=bits)), machine)
        token = 2 * cache.num_layers * cache.num_kv_heads * cache.head_dim * bits / 8
        room = machine.memory * 0.9 - weights
        fit = f"{int(room / (token * load.context)):,}" if room > 0 else "no room"
        yield f"{name:12}{bits:6.2f}{token / 1024:11.1f}{seconds * 1e3:8.2f}{load.seqs / seconds:10,.0f}{fit:>7}"


def by_plan(graph: Graph, machine: Machine, load: Load, acceptance: float) -> Iterator[str]:
    off = step_seconds(step_costs(graph, replace(load, rows=load.seqs)), machine)
    for n in (0, 1, 2, 4, 8, 16, 32):
        seconds = step_seconds(step_costs(graph, replace(load, rows=load.seqs * (n + 1))), machine)
        tokens = chain_tokens(acceptance, n)
        yield (f"{n or 'off':>4}{seconds * 1e3:9.2f}{seconds / off:7.2f}{tokens:8.2f}{load.seqs * tokens / seconds:10,.0f}"
               f"{tokens * off / seconds:7.2f}")


def chain_tokens(acceptance: float, n: int) -> float:
    """Tokens of a step that verifies a chain of n: (1 - a^(n+1)) / (1 - a)."""
    return (1 - acceptance ** (n + 1)) / (1 - acceptance)


def plot(graph: Graph, cache: KvType, machine: Machine, load: Load) -> Iterator[str]:
    """A bar for each context and format, one scale for all."""
    formats = {name: KV_BITS[name] for name in ("bf16", "fp8", "int4") if name in KV_BITS}
    speeds = {
        (context, name): load.seqs / step_seconds(step_costs(graph, replace(load, rows=load.seqs, context=context, kv_bits=bits)), machine)
        for context in CONTEXTS for name, bits in formats.items()}
    top = max(speeds.values())
    for (context, name), speed in speeds.items():
        left = f"{context:>8,}" if name == next(iter(formats)) else " " * 8
        yield f"{left}  {name:5} {'#' * max(1, round(BAR * speed / top)):{BAR}} {speed:,.0f}"


def goals(name: str, machine: Machine, acceptance: float) -> Iterator[str]:
    """Goals in tokens/s for a shape, which a card check fills in."""
    yield ""
    yield f"goals       tokens/s, {name}: plain, and verifying {GOAL_NODES} drafted tokens at {acceptance:.0%}"
    yield f"{'weights':8}{'kv':6}" + "".join(f"{f'b{batch} c{context // 1024}k':>18}" for batch, context in GOALS)
    for weights, kv in (("bf16", "bf16"), ("int8", "fp8"), ("int4", "int4")):
        graph, _ = open_graph(name, weights, 64 * (GOAL_NODES + 1))
        cells = []
        for batch, context in GOALS:
            load = Load(batch, batch, context, kv_bits=KV_BITS[kv])
            plain = batch / step_seconds(step_costs(graph, load), machine)
            drafted = batch * chain_tokens(acceptance, GOAL_NODES) / step_seconds(
                step_costs(graph, replace(load, rows=batch * (GOAL_NODES + 1))), machine)
            cells.append(f"{f'{plain:,.0f} / {drafted:,.0f}':>18}")
        yield f"{weights:8}{kv:6}" + "".join(cells)
