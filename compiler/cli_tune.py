"""Measure an artifact on this machine with your prompts, and write the plan beside it: <name>.plan.json.

What a step costs by rows and context, what the target accepts of each level's drafts by depth, and how fast the ways to draft are:
predicted from the two, and run. An engine that loads the artifact on this machine begins with it; `mlsdc explain` shows it.

On a GPU first which build of each kernel is fastest, by rows of a step, into <name>.kernels.json.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.errors import MlsdcError

if TYPE_CHECKING:
    from mlsdc.runtime.plan_file import PlanFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines of chats or texts")
    parser.add_argument("--kernels-only", action="store_true", help="choose among a GPU's kernels and leave the plan; needs no prompts")
    parser.add_argument("--per-kind", type=int, metavar="N", help="prompts of each kind (default: all)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of an answer (64)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of the step times (5)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores this process may use")
    parser.add_argument("--device", default="auto", metavar="NAME")
    parser.add_argument("--no-check", action="store_true", help="do not run the plans after predicting them")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: <name>.plan.json beside the artifact")
    parser.add_argument("--kernels-output", type=Path, metavar="FILE", help="default: <name>.kernels.json beside the artifact")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw step times and survival (matplotlib)")


def main(args: argparse.Namespace) -> int:
    from mlsdc.runtime.bench.prompts import read_prompts
    from mlsdc.runtime.bench.tune import tune
    from mlsdc.runtime.plan_file import plan_path

    for name, least in (("tokens", 8), ("rounds", 1)):
        if getattr(args, name) < least:
            raise MlsdcError(f"--{name}: {getattr(args, name)} is too few, expected at least {least}")
    if args.prompts is None and not args.kernels_only:
        raise MlsdcError("--prompts: give a file of prompts like yours; only --kernels-only does without")
    prompts = None if args.kernels_only else read_prompts(args.prompts, args.per_kind)
    found = choose_kernels(args)
    if prompts is None or (found and not Artifact.open(args.artifact).manifest.levels[1:]):
        return 0
    threads = len(os.sched_getaffinity(0)) if args.threads is None else args.threads
    plan = tune(args.artifact, prompts, threads=threads, device=args.device, max_tokens=args.tokens, rounds=args.rounds,
                check=not args.no_check, say=lambda text: print(text, file=sys.stderr), kernel_file=args.kernels_output if found else None)
    output = args.output or plan_path(args.artifact)
    write(output, plan.to_json())
    print("\n".join(told(plan)))
    if args.plot:
        print(draw(plan, args.plot))
    print(f"written: {output}")
    return 0


def choose_kernels(args: argparse.Namespace) -> bool:
    """Time the builds of a GPU's kernels and write which are the fastest; False: there are none to choose among."""
    from mlsdc.runtime.kernel_file import has_variants, kernels_path
    from mlsdc.runtime.kernel_file import told as kernels_told

    target = Artifact.open(args.artifact).pick_target(args.device)
    if target.device.partition(":")[0] != "cuda" or not has_variants(target):
        if args.kernels_only:
            raise MlsdcError(f"--kernels-only: target {target.name} has no kernels with several builds to choose among")
        return False
    from mlsdc.runtime.bench.tune_kernels import tune_kernels

    found = tune_kernels(args.artifact, device=args.device, say=lambda text: print(text, file=sys.stderr))
    output = args.kernels_output or kernels_path(args.artifact)
    write(output, found.to_json())
    print("\n".join(kernels_told(found)))
    print(f"written: {output}")
    return True


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MlsdcError(f"{path}: cannot be written: {error.strerror}") from None


def told(plan: PlanFile) -> Iterator[str]:
    """The plan as a table."""
    table = plan.costs
    yield f"machine  {plan.machine}; {plan.prompts} prompts, {plan.tokens} tokens"
    yield "step     " + " ".join(f"{rows:>6}" for rows in table.rows) + "  rows"
    for context, line in zip(table.contexts, table.seconds, strict=True):
        yield f"{context:6}   " + " ".join(f"{1e3 * seconds:6.2f}" for seconds in line) + "  ms after so many tokens"
    drafts = ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in table.draft_s.items())
    yield f"draft    {drafts}; {1e6 * plan.host_s:.0f} us a step outside of the programs"
    yield from survival_lines(plan)
    yield from speed_lines(plan)


def survival_lines(plan: PlanFile) -> Iterator[str]:
    keys = dict.fromkeys((rate.level, rate.sampled) for rate in plan.rates)
    for level, sampled in keys:
        found = [rate for rate in plan.rates if (rate.level, rate.sampled) == (level, sampled) and rate.depth <= 8]
        yield (f"accepts  {level}, {'T 0.7' if sampled else 'greedy'}, by depth: "
               + " ".join(f"{rate.hit:.2f}" for rate in found) + "   the level said " + " ".join(f"{rate.mass:.2f}" for rate in found))


def speed_lines(plan: PlanFile) -> Iterator[str]:
    yield f"{'plan':28} {'tok/step':>8} {'predicted':>10} {'measured':>9}  tokens/s"
    for speed in plan.speeds:
        ran = "not run" if speed.measured is None else f"{speed.measured:.1f}"
        off = "" if speed.measured is None else f"  {100 * (speed.predicted / speed.measured - 1):+.0f} %"
        yield f"{speed.name:28} {speed.length:8.2f} {speed.predicted:10.1f} {ran:>9}{off}"
    for name, why in plan.dropped.items():
        yield f"dropped  {name}: {why}"


def draw(plan: PlanFile, path: Path) -> str:
    """Step times and survival as a PNG; says so where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no plot: pip install matplotlib"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    for context, line in zip(plan.costs.contexts, plan.costs.seconds, strict=True):
        left.plot(plan.costs.rows, [1e3 * seconds for seconds in line], marker=".", label=f"after {context} tokens")
    left.set(xlabel="rows", ylabel="ms a step", ylim=(0, None))
    left.legend()
    for level, sampled in dict.fromkeys((rate.level, rate.sampled) for rate in plan.rates):
        found = [rate for rate in plan.rates if (rate.level, rate.sampled) == (level, sampled)]
        right.plot([rate.depth for rate in found], [rate.hit for rate in found], marker=".", label=f"{level}{', T 0.7' if sampled else ''}")
    right.set(xlabel="depth", ylabel="accepted", ylim=(0, 1))
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return f"drawn: {path}"
