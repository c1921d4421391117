"""Serving from your own process: load an artifact, answer prompts together, stream one.

    python examples/embed.py build/smollm2.mlsdc
"""

from __future__ import annotations

import sys

from mlsdc.runtime import Engine, SamplingParams


def main(artifact: str) -> None:
    with Engine.load(artifact) as engine:
        chats = [[{"role": "user", "content": text}] for text in ("Tell me the capital of France.", "Name three colours.")]
        for result in engine.generate(chats, SamplingParams(max_tokens=48)):
            print(f"{result.text!r}  ({result.finish_reason}, {result.statistics.acceptance_length:.2f} tokens a step)")

        for delta in engine.stream([{"role": "user", "content": "Count from one to ten."}], SamplingParams(max_tokens=64)):
            print(delta.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1])
