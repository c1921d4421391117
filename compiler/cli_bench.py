"""Measure an artifact on this machine: decode, prefill, verify or startup.

Cases run in turn, round after round, with a streaming read of memory in the same rounds; figures are medians with the lowest and the
highest round. docs/bench.md says what is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from mlsdc.runtime.errors import MlsdcError

VERBS = ("decode", "prefill", "verify", "startup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=VERBS)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores this process may use")
    parser.add_argument("--device", default="auto", metavar="NAME", help="a target of the artifact (default: the best that fits)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="decode: tokens a round")
    parser.add_argument("--context", type=numbers, metavar="N[,N]", help="decode: prompt tokens (1); verify: committed tokens (256,1024)")
    parser.add_argument("--lengths", type=numbers, default=(128, 1024), metavar="N[,N]", help="prefill: prompt lengths")
    parser.add_argument("--rows", type=numbers, default=(1, 2, 4, 8), metavar="N[,N]", help="verify: rows of a step")
    parser.add_argument("--peer", metavar="llama-bench=PATH", help="decode, prefill: run this program in turn and print ratios")
    parser.add_argument("--peer-model", metavar="GGUF")
    parser.add_argument("--profile", action="store_true", help="time by kernel, too")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON, too; - prints it instead of the table")


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

    for name in ("rounds", "tokens"):
        if getattr(args, name) < (2 if name == "tokens" else 1):
            raise MlsdcError(f"--{name}: {getattr(args, name)} is too few")
    threads = len(os.sched_getaffinity(0)) if args.threads is None else args.threads
    peer = LlamaBench.parse(args.peer, args.peer_model, threads) if args.peer else None
    if peer is not None and args.what not in ("decode", "prefill"):
        raise MlsdcError(f"--peer: `mlsdc bench {args.what}` has nothing to compare with it")
    if args.what == "startup":
        report = verbs.startup(args.artifact, threads, rounds=args.rounds)
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
    text = json.dumps(report.to_json(), indent=1) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
        return 0
    if args.json:
        try:
            Path(args.json).write_text(text, encoding="utf-8")
        except OSError as error:
            raise MlsdcError(f"--json: {args.json} cannot be written: {error.strerror}") from None
    print("\n".join(report.lines()))
    return 0
