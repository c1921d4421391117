"""Tokens per target step when every proposed node is verified, level by level: what levels know, whatever it costs to ask them.

    python -m mlsdc.runtime.bench.acceptance smollm2.mlsdc --prompts prompts.jsonl.gz --level eagle --level counts+eagle

Greedy. `--level A+B` merges the trees of levels A and B, `--level A>B` has B judge and extend A's; without --level the artifact's cascade
as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mlsdc.runtime.bench.cascades import cascade_of
from mlsdc.runtime.bench.everything import Everything
from mlsdc.runtime.bench.prompts import BenchPrompt, read_prompts
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.levels.growing import NEVER, GrowingLevel
from mlsdc.runtime.sampling_params import SamplingParams


def lengths(engine: Engine, prompts: Sequence[BenchPrompt], max_tokens: int) -> dict[str, float]:
    """Tokens per target step by kind of prompt, and over `all`."""
    sums: dict[str, list[int]] = {}
    for prompt in prompts:
        (result,) = engine.generate([prompt.prompt], SamplingParams(max_tokens=max_tokens))
        for kind in (prompt.kind, "all"):
            accepted, steps = sums.setdefault(kind, [0, 0])
            statistics = result.statistics
            sums[kind] = [accepted + statistics.accepted, steps + statistics.steps]
    return {kind: 1 + accepted / max(1, steps) for kind, (accepted, steps) in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--level", action="append", default=[], metavar="CASCADE")
    parser.add_argument("--max-nodes", type=int, default=63, metavar="N", help="of a tree")
    parser.add_argument("--tokens", type=int, default=256, metavar="N")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts)
    with Engine.load(args.artifact, threads=args.threads) as engine:
        engine.drafting.controller = Everything()
        for level in engine.drafting.levels:
            if isinstance(level, GrowingLevel):
                level.least = NEVER
        kinds = ["all", *dict.fromkeys(prompt.kind for prompt in prompts)]
        print(f"{'level':24}" + "".join(f"{kind:>10}" for kind in kinds), flush=True)
        for names in args.level or [""]:
            if names:
                engine.drafting.level = cascade_of(engine, names, args.max_nodes, "--level")
            found = lengths(engine, prompts, args.tokens)
            print(f"{names or 'cascade':24}" + "".join(f"{found[kind]:10.2f}" for kind in kinds), flush=True)


if __name__ == "__main__":
    main()
