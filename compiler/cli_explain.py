"""Say why an artifact is what it is: the cascade, the cache, every pass with the rules that fired or declined, the kernels.

    mlsdc explain m.mlsdc trace.json     # and what `mlsdc trace` measured, beside what was planned

What `mlsdc tune` measured, the files m.plan.json and m.kernels.json beside the artifact, is told, too: levels kept and dropped, the tree
that pays, speeds; which builds of a GPU's kernels are launched.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlsdc.compiler.explain_plan import plan_lines
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.kernel_file import beside
from mlsdc.runtime.kv_format import FORMATS, KvGeometry
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.plan_file import PlanFile, plan_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact")
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="of `mlsdc trace`: measured beside planned")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="of `mlsdc tune`; default: <name>.plan.json beside the artifact")
    parser.add_argument("--json", action="store_true", help="explain.json as it is")


def main(args: argparse.Namespace) -> int:
    artifact = Artifact.open(args.artifact)
    text = artifact.path("explain.json").read_text(encoding="utf-8")
    if args.json:
        print(text, end="")
        return 0
    measured = None
    if args.trace:
        from mlsdc.compiler.view.data import trace_summary

        measured = trace_summary(args.trace)
    place = args.plan or plan_path(artifact.root)
    plan = PlanFile.read(place) if args.plan or place.is_file() else None
    for line in explain(artifact, json.loads(text), measured, plan):
        print(line)
    return 0


def explain(artifact: Artifact, explained: Mapping[str, Any], measured: Mapping[str, Any] | None, plan: PlanFile | None = None
            ) -> Iterator[str]:
    passes = {entry["pass"]: entry for entry in explained["passes"]}
    yield from cascade(artifact, passes, measured)
    if plan is not None:
        yield from plan_lines(artifact, plan)
    elif artifact.manifest.levels[1:]:
        yield f"not tuned: `mlsdc tune {artifact.root.name} --prompts FILE` measures this machine and its survival rates"
    for level in artifact.manifest.levels:
        if level.kv is not None:
            yield from cache(level, level.kv, artifact.manifest.limits.max_model_len)
    yield from weights(artifact, passes)
    yield "passes"
    for entry in explained["passes"]:
        yield from explain_pass(entry)
    yield from kernels(artifact, measured)
    yield from beside(artifact)


def cascade(artifact: Artifact, passes: Mapping[str, Any], measured: Mapping[str, Any] | None) -> Iterator[str]:
    manifest = artifact.manifest
    plan, drafting = manifest.plan, manifest.levels[:-1]
    yield "cascade"
    if not drafting:
        yield "  plain decoding: the model.yaml names no level that guesses"
        return
    yield f"  {chain(manifest.levels)}: up to {plan.draft_tokens} nodes a step, as many of them as pay, step by step; off is always " \
          "possible"
    if measured is None:
        yield "  measured nothing yet: give the file of `mlsdc trace` as a second argument"
        return
    yield f"  measured {measured['acceptance_rate']:.1%} of {measured['drafted']} nodes accepted, " \
          f"{measured['acceptance_length']:.2f} tokens a step; " \
          f"{measured['draft_ms'] * 1e3:.0f} us a draft, {measured['verify_ms']:.1f} ms a verify of {measured['rows_per_step']:.1f} rows"


def chain(levels: Sequence[LevelInfo]) -> str:
    """Levels from the cheapest to the target; merged ones, which the same level verifies, stand side by side."""
    stages: dict[str, list[str]] = {}
    for level, above in zip(levels, [*(level.name for level in levels[1:]), ""], strict=True):
        stages.setdefault(str(level.params.get("verified_by", above)), []).append(f"{level.name} ({level.kind})")
    return " -> ".join(" + ".join(names) for names in stages.values())


def cache(level: LevelInfo, kv: KvGeometry, tokens: int) -> Iterator[str]:
    yield f"cache of {level.name}"
    bits = kv.kv.bits_per_element(kv.page_size, kv.head_dim)
    yield f"  {kv.format}, {bits:g} bits an element: {kv.bytes_per_token:.0f} bytes a token, " \
          f"{kv.bytes_per_token * tokens / 2**20:.1f} MiB for {tokens} tokens; chosen by target.kv.dtype in the model.yaml"
    others = [KvGeometry(name, kv.page_size, kv.num_layers, kv.num_kv_heads, kv.head_dim) for name in FORMATS if name != kv.format]
    yield from (f"  {other.format} would take {other.bytes_per_token:.0f} bytes a token" for other in others)
    yield f"  page of {kv.page_size} tokens, {kv.page_bytes} bytes: at most {kv.page_size - 1} tokens of a sequence's last page are empty"


def weights(artifact: Artifact, passes: Mapping[str, Any]) -> Iterator[str]:
    options = passes.get("quantise-weights", {}).get("options", {})
    yield "weights"
    yield f"  {artifact.manifest.model.weights_dtype} from {artifact.manifest.model.source}" + \
        "".join(f"; {name} {shown(value)}" for name, value in options.items() if name != "weights" and value)


def explain_pass(entry: Mapping[str, Any]) -> Iterator[str]:
    graphs = ", ".join(f"{where} {change['before']} -> {change['after']} nodes" for where, change in entry["graphs"].items())
    given = ", ".join(f"{name} {shown(value)}" for name, value in entry["options"].items())
    yield f"  {entry['pass']:18} {graphs or 'changed nothing'}{f'  ({given})' if given else ''}"
    for equation, places in entry["fired"].items():
        yield f"    fired {len(places):3} x  {equation}    first at {places[0]}"
    for equation, count in entry["declined"].items():
        if count:
            yield f"    declined at all {count} nodes it was tried at: {equation}"


def shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def kernels(artifact: Artifact, measured: Mapping[str, Any] | None) -> Iterator[str]:
    times: Mapping[str, float] = (measured or {}).get("kernels", {})
    total = sum(times.values())
    for target in artifact.manifest.targets:
        checked = ", ".join(f"{count} {what}" for what, count in Counter(kernel.checked_by for kernel in target.kernels.values()).items())
        yield f"kernels for {target.name} ({checked}); needs {' '.join(target.requires)}"
        launches = Counter(
            launch.kernel for level in artifact.manifest.levels if target.name in level.programs
            for program in artifact.programs(level.name, target).values() for launch in program.launches)
        for key in sorted(target.kernels, key=lambda key: (-times.get(key, 0.0), -launches[key], key)):
            yield f"  {launches[key]:4} launches  {f'{times.get(key, 0.0) / total:6.1%}  ' if total else ''}{key}"
