"""How many requests run at once in a page pool: as many as the memory plan says, all different, and then one more.

    python -m mlsdc.runtime.bench.crowd m.mlsdc --pool 268435456 --context 2048

Every request ends with `context` tokens, prompt and output, and drafts nothing. Outputs are long enough that the first request still
decodes when the last one has joined. The planned number must decode in one step with nobody preempted; nothing is estimated: rows are
computed, pages owned.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.memory_plan import plan_artifact
from mlsdc.runtime.sampling_params import SamplingParams, Speculation


@dataclass(frozen=True)
class Crowd:
    """Of a run: requests submitted, the most that decoded in one step, and how often one was preempted."""

    requests: int
    at_once: int
    preemptions: int


def crowd(path: str | Path, pool_bytes: int, context: int, count: int, threads: int | None = None) -> Crowd:
    """Serve `count` requests; pages are counted after every step. Raises CapacityError where one is lost."""
    rng = np.random.default_rng(0)
    at_once = 0
    with Engine.load(path, threads=threads, kv_pool_bytes=pool_bytes) as engine:
        limits = engine.manifest.limits
        output = min(context // 2, (count + 1) * (context // limits.max_num_batched_tokens + 1))
        params = SamplingParams(max_tokens=output, ignore_eos=True, speculation=Speculation(enabled=False))
        prompts = [rng.integers(0, engine.manifest.model.vocab_size, context - output).tolist() for _ in range(count)]
        requests = [engine.submit(prompt, params) for prompt in prompts]
        while not all(request.finished for request in requests):
            engine.step()
            engine.check_integrity()
            at_once = max(at_once, sum(request.decoding for request in engine.scheduler.running))
    return Crowd(count, at_once, sum(request.statistics.preemptions for request in requests))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--pool", type=int, default=256 << 20, metavar="BYTES")
    parser.add_argument("--context", type=int, default=2048, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N")
    args = parser.parse_args()
    artifact = Artifact.open(args.artifact)
    plan = plan_artifact(artifact, artifact.pick_target(), kv_pool_bytes=args.pool)
    planned = plan.users(args.context, drafts=False)
    for count in (planned, planned + 1):
        found = crowd(args.artifact, args.pool, args.context, count, args.threads)
        print(f"{artifact.root.name}: {found.requests} requests of {args.context} tokens in {args.pool:,} bytes: {found.at_once} decoded "
              f"at once, {found.preemptions} preemptions", flush=True)


if __name__ == "__main__":
    main()
