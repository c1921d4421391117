"""Show what is in an artifact: model, cascade, KV cache, limits, programs and kernels."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.manifest import LevelInfo, TargetInfo
from mlsdc.runtime.program import ProgramSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="the manifest")
    what.add_argument("--kernels", action="store_true", help="every kernel: what it was checked by, its source, its arguments")
    what.add_argument("--program", metavar="LEVEL.NAME", help="every launch of a program, e.g. target.forward")
    what.add_argument("--graph", metavar="LEVEL", help="the level's final graph, as text")
    what.add_argument("--source", metavar="KERNEL", help="a kernel's generated source")


def main(args: argparse.Namespace) -> int:
    artifact = Artifact.open(args.artifact)
    if args.json:
        print(artifact.manifest.to_json(), end="")
    elif args.source:
        print(source(artifact, args.source), end="")
    elif args.graph:
        print(artifact.path(f"graph/{args.graph}.ir").read_text(encoding="utf-8"), end="")
    else:
        lines = kernels(artifact) if args.kernels else launches(artifact, args.program) if args.program else summary(artifact)
        for line in lines:
            print(line)
    return 0


def summary(artifact: Artifact) -> Iterator[str]:
    manifest = artifact.manifest
    model, limits, plan = manifest.model, manifest.limits, manifest.plan
    yield f"{artifact.root.name}  (sha256 {artifact.sha256[:16]}, format {manifest.format})"
    yield f"model      {model.name}: {model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}, {model.vocab_size} tokens"
    yield f"source     {model.source}, weights {model.weights_dtype}"
    yield f"limits     {', '.join(f'{name} {value}' for name, value in vars(limits).items())}"
    yield f"plan       {plan.draft_tokens} drafted a step, at most {plan.max_draft_tokens}; off is always possible"
    for level in manifest.levels:
        yield from _level(artifact, level)
    for target in manifest.targets:
        checked = Counter(kernel.checked_by for kernel in target.kernels.values())
        what = ", ".join(f"{count} {name}" for name, count in sorted(checked.items()))
        yield f"target     {target.name} ({target.device}): {len(target.kernels)} kernels ({what}); requires {' '.join(target.requires)}"
        for level in manifest.levels:
            for name, program in _programs(artifact, level, target).items():
                yield f"  program  {level.name}.{name}: {len(program.launches)} launches, {len(program.kernels())} kernels, " \
                      f"arena {size(program.arena_bytes)}"
    yield f"tools      {', '.join(f'{name} {version}' for name, version in manifest.tools.items())}"


def _level(artifact: Artifact, level: LevelInfo) -> Iterator[str]:
    params = ", ".join(f"{name} {value}" for name, value in level.params.items())
    weights = f"  weights {size(artifact.manifest.weights[level.weights][0])}" if level.weights else ""
    yield f"level      {level.name}: {level.kind}{weights}{'  ' + params if params else ''}"
    if level.kv is not None:
        kv = level.kv
        yield f"  kv       {kv.format}: {kv.num_layers} layers x {kv.num_kv_heads} heads x {kv.head_dim}; page of {kv.page_size} tokens, " \
              f"{size(kv.page_bytes)}; {kv.bytes_per_token:.0f} bytes a token"


def _programs(artifact: Artifact, level: LevelInfo, target: TargetInfo) -> dict[str, ProgramSpec]:
    return artifact.programs(level.name, target) if target.name in level.programs else {}


def kernels(artifact: Artifact) -> Iterator[str]:
    for target in artifact.manifest.targets:
        for key, kernel in target.kernels.items():
            resources = "  ".join(f"{name} {value}" for name, value in kernel.resources.items())
            yield f"{key}"
            yield f"  {target.name}, {kernel.checked_by}; {kernel.source} -> {kernel.file}:{kernel.entry}  {resources}".rstrip()
            yield f"  {', '.join(kernel.abi)}"


def launches(artifact: Artifact, wanted: str) -> Iterator[str]:
    found = {
        f"{level.name}.{name}": program
        for target in artifact.manifest.targets[:1] for level in artifact.manifest.levels
        for name, program in _programs(artifact, level, target).items()
    }
    if wanted not in found:
        raise MlsdcError(f"--program: no program '{wanted}'; programs are {', '.join(found)}")
    for launch in found[wanted].launches:
        grid = str(launch.grid) if launch.count is None else f"{launch.grid} x {launch.count.lower()}"
        args = " ".join(f"{key}:{value}" for arg in launch.args for key, value in vars(arg).items())
        yield f"{launch.node:40}  {launch.kernel:48}  grid {grid:14}  {args}"


def source(artifact: Artifact, key: str) -> str:
    for target in artifact.manifest.targets:
        if key in target.kernels:
            return artifact.path(target.kernels[key].source).read_text(encoding="utf-8")
    raise MlsdcError(f"--source: no kernel '{key}'; `mlsdc inspect ... --kernels` lists them")


def size(num_bytes: int) -> str:
    """Bytes as a person reads them: `23.6 MiB`."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value, unit = num_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"
