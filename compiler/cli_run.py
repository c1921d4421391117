"""Answer a prompt. The text goes to stdout as it comes; --stats goes to stderr.

The prompt is put through the model's chat template, if it has one (--raw leaves it as it is). `--prompt -` reads it from stdin.
"""

from __future__ import annotations

import argparse
import sys

from mlsdc.runtime.statistics import Statistics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--no-speculation", action="store_true", help="plain decoding; the text is the same, only slower")
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument("--device", default="auto", metavar="NAME", help="a target of the artifact (default: the best that fits)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores this process may use")
    parser.add_argument("--stats", action="store_true", help="tokens per second, and what each level drafted and got accepted")


def main(args: argparse.Namespace) -> int:
    from mlsdc.runtime.engine import Engine
    from mlsdc.runtime.sampling_params import SamplingParams, Speculation

    params = SamplingParams(max_tokens=args.max_tokens, speculation=Speculation(enabled=False) if args.no_speculation else None)
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    with Engine.load(args.artifact, threads=args.threads, device=args.device) as engine:
        device, kernels = engine.device.name, engine.device.kernel_note
        chat = not args.raw and text.strip() and engine.tokenizer is not None and engine.tokenizer.has_chat_template
        prompt = [{"role": "user", "content": text}] if chat else text
        (result,) = engine.generate([prompt], params, on_token=lambda _, delta: print(delta.text, end="", flush=True))
        print()
    if args.stats:
        first, total = result.timings.time_to_first_token_s or 0.0, result.timings.total_s or 0.0
        print(f"device     {device}", file=sys.stderr)
        if kernels:
            print(f"kernels    {kernels}", file=sys.stderr)
        print("\n".join(report(result.statistics, len(result.prompt_token_ids), len(result.token_ids), first, total)), file=sys.stderr)
    return 0


def report(statistics: Statistics, prompt_tokens: int, tokens: int, first_s: float, total_s: float) -> list[str]:
    """The lines of --stats. Decoding speed leaves out the first token, which the prompt pays for."""
    decode_s = total_s - first_s
    speed = f"{(tokens - 1) / decode_s:.1f} tokens/s" if tokens > 1 and decode_s > 0 else "too short to time"
    lines = [
        f"prompt     {prompt_tokens} tokens, first token after {1000 * first_s:.0f} ms",
        f"decode     {tokens} tokens in {statistics.steps} steps, {speed}",
    ]
    if statistics.drafted:
        lines.append(f"accepted   {statistics.acceptance_rate:.1%} of {statistics.drafted} drafted nodes; "
                     f"{statistics.acceptance_length:.2f} tokens a step")
    for name, level in statistics.levels.items():
        depths = "  ".join(f"{depth}: {count.rate:.0%}" for depth, count in enumerate(level.depths, 1))
        lines.append(f"  {name:8} {level.acceptance_rate:.1%} of {level.drafted}; by depth  {depths}")
    return lines
