"""Serve one prompt and write what happened as a trace: open it in https://ui.perfetto.dev or chrome://tracing, or give it to `mlsdc view`.

    mlsdc trace m.mlsdc --prompt "..." -o trace.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N")
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument("--no-kernels", action="store_true", help="time whole verifies, as they run in serving, not every launch")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores this process may use")


def main(args: argparse.Namespace) -> int:
    from mlsdc.compiler.trace import trace
    from mlsdc.runtime.engine import Engine
    from mlsdc.runtime.errors import MlsdcError
    from mlsdc.runtime.sampling_params import SamplingParams

    with Engine.load(args.artifact, threads=args.threads) as engine:
        chat = not args.raw and engine.tokenizer is not None and engine.tokenizer.has_chat_template
        prompt = [{"role": "user", "content": args.prompt}] if chat else args.prompt
        traced = trace(engine, prompt, SamplingParams(max_tokens=args.max_tokens), kernels=not args.no_kernels)
    try:
        args.output.write_text(json.dumps(traced, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as error:
        raise MlsdcError(f"{args.output}: cannot be written ({error.strerror})") from None
    for line in report(traced["otherData"]["summary"]):
        print(line)
    print(f"{args.output}  {len(traced['traceEvents'])} events")
    return 0


def report(summary: dict[str, object]) -> list[str]:
    """What the trace comes to, and the kernels that took most of it."""
    s: dict[str, float] = {key: value for key, value in summary.items() if isinstance(value, int | float)}
    lines = [
        f"steps      {s['steps']:.0f} of {s['rows_per_step']:.1f} rows",
        f"cost       {s['verify_ms']:.2f} ms a verify, {s['draft_ms'] * 1e3:.0f} us a draft",
        f"tokens     {s['tokens']:.0f} after a prompt of {s['prompt_tokens']:.0f}, {s['acceptance_length']:.2f} a step",
        f"accepted   {s['acceptance_rate']:.1%} of {s['drafted']:.0f} drafted nodes",
    ]
    kernels = summary["kernels"]
    assert isinstance(kernels, dict)
    total = sum(kernels.values())
    return lines + [f"  {value / total:6.1%}  {value / 1e3:8.2f} ms  {key}" for key, value in list(kernels.items())[:8]]
