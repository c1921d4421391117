"""Measure an artifact on this machine: decode, prefill, verify, startup, spec (what drafts bring); serve, throughput, latency.

Cases run in turn, round after round, with a streaming read of memory in the same rounds; figures are medians with the lowest and the
highest round. docs/bench.md says what is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mlsdc.compiler import cli_bench_serve
from mlsdc.runtime.errors import MlsdcError

if TYPE_CHECKING:
    from mlsdc.runtime.bench.report import Report
    from mlsdc.runtime.bench.spec import SpecReport

VERBS = ("decode", "prefill", "verify", "startup", "spec", "gpu-check", *cli_bench_serve.VERBS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=VERBS)
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores this process may use")
    parser.add_argument("--device", default="auto", metavar="NAME", help="a target of the artifact (default: the best that fits)")
    parser.add_argument("--rounds", type=int, metavar="N", help="default 7, spec: 1")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="decode: tokens a round; spec: tokens a prompt")
    parser.add_argument("--context", type=numbers, metavar="N[,N]", help="decode: prompt tokens (1); verify: committed tokens (256,1024)")
    parser.add_argument("--lengths", type=numbers, default=(128, 1024), metavar="N[,N]", help="prefill: prompt lengths")
    parser.add_argument("--rows", type=numbers, default=(1, 2, 4, 8), metavar="N[,N]", help="verify: rows of a step")
    parser.add_argument("--peer", metavar="llama-bench=PATH", help="a program to run in turn; serve: llama-server=PATH")
    parser.add_argument("--peer-model", metavar="GGUF")
    parser.add_argument("--reference", type=Path, metavar="ARTIFACT", help="gpu-check: the same model for this machine's CPU")
    parser.add_argument("--profile", action="store_true", help="time by kernel, too")
    parser.add_argument("--per-kind", type=int, metavar="N", help="spec: prompts of each kind (default: all)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="spec: prompts at once")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="spec")
    parser.add_argument("--seed", type=int, default=0, help="spec")
    parser.add_argument("--cascade", action="append", default=[], metavar="LEVELS", help="spec: levels of the artifact that draft: "
                        "counts+eagle merged, counts>small stacked; several are compared in one run")
    parser.add_argument("--max-nodes", type=int, default=32, metavar="N", help="spec: of a merged tree of --cascade (32)")
    parser.add_argument("--coupling", action="store_true", help="spec: at T > 0, by level, how often its first guess is what is drawn, "
                        "and how far its distribution is from the target's")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="spec: write what the controller saw and chose, as JSON lines")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="spec: draw speeds, tokens a step, times of a token (matplotlib)")
    cli_bench_serve.add_arguments(parser, numbers)
    parser.add_argument("--json", "--output-json", metavar="FILE", help="write everything as JSON, too; - prints it instead of the table")


def gpu_check(args: argparse.Namespace) -> int:
    """Exit code 1 where the card computes something else than the CPU."""
    from mlsdc.compiler import cli_gpu_check as check

    if args.artifact is None:
        raise MlsdcError("mlsdc bench gpu-check: expected an artifact")
    found = check.gpu_check(args.artifact, args.reference, "cuda" if args.device == "auto" else args.device)
    text = json.dumps(found.to_json(), indent=1) + "\n"
    if args.json and args.json != "-":
        Path(args.json).write_text(text, encoding="utf-8")
    print(text if args.json == "-" else "\n".join(found.lines()))
    return 0 if found.passed else 1


def numbers(text: str) -> tuple[int, ...]:
    """`1,2,4` as positive numbers, for argparse."""
    found = tuple(int(part) for part in text.split(","))
    if min(found) < 1:
        raise ValueError
    return found


def main(args: argparse.Namespace) -> int:
    from mlsdc.runtime.bench import verbs
    from mlsdc.runtime.bench.peer import LlamaBench
    from mlsdc.runtime.bench.rig import Rig

    if args.rounds is None:
        args.rounds = 1 if args.what == "spec" else 7
    for name in ("rounds", "tokens", "batch"):
        if getattr(args, name) < (2 if name == "tokens" else 1):
            raise MlsdcError(f"--{name}: {getattr(args, name)} is too few")
    if args.what == "gpu-check":
        return gpu_check(args)
    threads = len(os.sched_getaffinity(0)) if args.threads is None else args.threads
    if args.peer and args.what not in ("decode", "prefill", "serve"):
        raise MlsdcError(f"--peer: `mlsdc bench {args.what}` has nothing to compare with it")
    peer = LlamaBench.parse(args.peer, args.peer_model, threads) if args.peer and args.what != "serve" else None
    report: Report | SpecReport
    if args.what in cli_bench_serve.VERBS:
        report = cli_bench_serve.main(args, threads)
    elif args.artifact is None:
        raise MlsdcError(f"mlsdc bench {args.what}: expected an artifact")
    elif args.what == "startup":
        report = verbs.startup(args.artifact, threads, rounds=args.rounds)
    elif args.what == "spec":
        report = spec(args, threads)
    else:
        with Rig(args.artifact, threads=threads, device=args.device) as rig:
            if args.what == "decode":
                context = (args.context or (1,))[0]
                report = verbs.decode(rig, tokens=args.tokens, context=context, rounds=args.rounds, peer=peer, profile=args.profile)
            elif args.what == "prefill":
                report = verbs.prefill(rig, lengths=args.lengths, rounds=args.rounds, peer=peer, profile=args.profile)
            else:
                contexts = args.context or (256, 1024)
                report = verbs.verify(rig, contexts=contexts, rows=args.rows, rounds=args.rounds, profile=args.profile)
    return show(args, report)


def spec(args: argparse.Namespace, threads: int) -> SpecReport:
    from mlsdc.runtime.artifact import Artifact
    from mlsdc.runtime.bench.coupling import measure as of_levels
    from mlsdc.runtime.bench.prompts import read_prompts
    from mlsdc.runtime.bench.spec import SpecReport, measure
    from mlsdc.runtime.engine import Engine
    from mlsdc.runtime.sampling_params import SamplingParams

    if args.prompts is None:
        raise MlsdcError("--prompts: `mlsdc bench spec` wants a file of prompts")
    if args.trace and args.cascade:
        raise MlsdcError("--trace: is of one controller; every --cascade has its own")
    if args.coupling and args.temperature <= 0:
        raise MlsdcError("--coupling: at temperature 0 nothing is drawn; give --temperature")
    drawn = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=args.seed) if args.coupling else None
    prompts = read_prompts(args.prompts, args.per_kind)
    sha256 = Artifact.open(args.artifact).sha256
    with Engine.load(args.artifact, threads=threads, device=args.device) as engine:
        if args.trace:
            engine.drafting.controller.trace = []
        kinds = measure(engine, prompts, batch=args.batch, rounds=args.rounds, max_tokens=args.tokens, temperature=args.temperature,
                        seed=args.seed, cascades=args.cascade, max_nodes=args.max_nodes)
        if args.trace:
            write(args.trace, "--trace", "".join(json.dumps(event) + "\n" for event in engine.drafting.controller.trace or ()))
        coupling = of_levels(engine, prompts, drawn) if drawn else ()
        target = engine.device.name
    report = SpecReport(args.artifact.name, sha256, target, threads, args.batch, args.temperature, args.tokens, args.rounds, kinds,
                        coupling)
    if args.plot:
        from mlsdc.compiler.plot_spec import draw

        print(draw(report, args.plot), file=sys.stderr)
    return report


def write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MlsdcError(f"{option}: {path} cannot be written: {error.strerror}") from None


def show(args: argparse.Namespace, report: Report | SpecReport) -> int:
    text = json.dumps(report.to_json(), indent=1) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
        return 0
    if args.json:
        write(Path(args.json), "--json", text)
    print("\n".join(report.lines()))
    return 0
