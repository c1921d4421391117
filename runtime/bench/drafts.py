"""How good and how quick an artifact's drafting level is, without running the model: replay of completions it once gave.

    python -m mlsdc.runtime.bench.drafts build/smollm2.mlsdc prompts.jsonl completions.jsonl --nodes 8

prompts: {"id", "messages"} a line; completions: {"id", "group", "T", "tokens"} a line (also .gz). Only greedy ones (T 0) count. Tokens per
target step = committed tokens / steps, the step's own choice included; the prompt's step is left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.tree import Tree, walk

Replayed = tuple[int, int, list[float]]  # tokens, steps, seconds of each proposal


def replay(level: Level, prompt: Sequence[int], output: Sequence[int], nodes: int) -> Replayed:
    """Draft and follow `output` after `prompt`, as a target that says exactly that would."""
    state = level.start()
    state.observe([*prompt, *output[:1]])
    done, steps, seconds = 1, 0, []
    while done < len(output):
        start = time.perf_counter()
        tree = state.propose(nodes)
        seconds.append(time.perf_counter() - start)
        new = output[done : done + accepted(tree, output[done:]) + 1]
        state.observe(new)
        done += len(new)
        steps += 1
    return len(output) - 1, steps, seconds


def accepted(tree: Tree, truth: Sequence[int]) -> int:
    """Nodes that a target which says `truth` accepts."""
    depths = tree.depths()
    choices = [truth[depth] if depth < len(truth) else -1 for depth in (0, *depths)]
    return len(walk(tree, choices)[0])


def read_lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("completions", type=Path)
    parser.add_argument("--nodes", type=int, default=8)
    options = parser.parse_args()
    prompts = {line["id"]: line["messages"] for line in read_lines(options.prompts)}
    groups: dict[str, list[Replayed]] = defaultdict(list)
    with Engine.load(options.artifact, threads=1) as engine:
        if not engine.drafting.levels:
            raise SystemExit(f"{options.artifact}: has no drafting level")
        for line in read_lines(options.completions):
            if line["id"] in prompts and line["T"] == 0:
                prompt = engine.tokenize(prompts[line["id"]])
                groups[line["group"]].append(replay(engine.drafting.levels[0], prompt, line["tokens"], options.nodes))
    groups["all"] = [done for group in list(groups.values()) for done in group]
    for name, runs in groups.items():
        tokens, steps = sum(run[0] for run in runs), sum(run[1] for run in runs)
        print(f"{name:10} {tokens / steps:5.2f} tokens a target step, {len(runs)} prompts")
    print(f"a tree of {options.nodes}: {1e6 * median(s for run in groups['all'] for s in run[2]):.1f} us")


if __name__ == "__main__":
    main()
