"""Show what is in an artifact: model, cascade, KV cache, limits, programs and kernels."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator

from mlsdc.compiler.capture.random_source import RANDOM
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.kernel_file import beside
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.manifest import LevelInfo, TargetInfo
from mlsdc.runtime.memory_plan import LevelPlan, effective_bits, plan_artifact
from mlsdc.runtime.program import ProgramSpec

CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="the manifest")
    what.add_argument("--kv", action="store_true", help="pages and bytes per token of every level, memory, and how many sequences fit")
    what.add_argument("--kernels", action="store_true", help="every kernel: what it was checked by, its source, its arguments")
    what.add_argument("--program", metavar="LEVEL.NAME", help="every launch of a program, e.g. target.forward")
    what.add_argument("--graph", metavar="LEVEL", help="the level's final graph, as text")
    what.add_argument("--kernel", metavar="KERNEL", help="one kernel, as --show says")
    what.add_argument("--source", metavar="KERNEL", help="a kernel's generated source, as --kernel KERNEL")
    parser.add_argument("--show", choices=("source", "ptx", "sass"), default="source", help="of --kernel (default source)")
    parser.add_argument("--target", metavar="NAME", help="whose kernel, where several targets have one of the name")


def main(args: argparse.Namespace) -> int:
    artifact = Artifact.open(args.artifact)
    if args.json:
        print(artifact.manifest.to_json(), end="")
    elif args.kernel or args.source:
        print(shown(artifact, args.kernel or args.source, args.show, args.target), end="")
    elif args.graph:
        print(artifact.path(f"graph/{args.graph}.ir").read_text(encoding="utf-8"), end="")
    else:
        lines = kernels(artifact) if args.kernels else launches(artifact, args.program) if args.program else \
            memory(artifact) if args.kv else summary(artifact)
        for line in lines:
            print(line)
    return 0


def summary(artifact: Artifact) -> Iterator[str]:
    manifest = artifact.manifest
    model, limits, plan = manifest.model, manifest.limits, manifest.plan
    yield f"{artifact.root.name}  (sha256 {artifact.sha256[:16]}, format {manifest.format})"
    yield f"model      {model.name}: {model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}, {model.vocab_size} tokens"
    meaningless = ": random numbers, its words mean nothing" if model.source.startswith(RANDOM) else ""
    yield f"source     {model.source}{meaningless}, weights {model.weights_dtype}"
    for what, names in json.loads(artifact.path("explain.json").read_text(encoding="utf-8")).get("weights", {}).items():
        yield f"  packed   {len(names)} x {what}" + (f" ({', '.join(names[:3])})" if len(names) <= 3 else "")
    yield f"limits     {', '.join(f'{name} {value}' for name, value in vars(limits).items())}"
    if manifest.world_size > 1:
        yield f"ranks      {manifest.world_size} processes, each with its share of heads and MLP columns; sizes below are of one"
    yield f"plan       {plan.draft_tokens} drafted a step, at most {plan.max_draft_tokens}; off is always possible"
    for level in manifest.levels:
        yield from _level(artifact, level)
    for target in manifest.targets:
        checked = Counter(kernel.checked_by for kernel in target.kernels.values())
        what = ", ".join(f"{count} {name}" for name, count in sorted(checked.items()))
        loose = "" if target.exact else "; not exact: a drafted row's bits may differ from those of the committed one"
        yield f"target     {target.name} ({target.device}): {len(target.kernels)} kernels ({what}); " \
              f"requires {' '.join(target.requires)}{loose}"
        for level in manifest.levels:
            for name, program in _programs(artifact, level, target).items():
                yield f"  program  {level.name}.{name}: {len(program.launches)} launches, {len(program.kernels())} kernels, " \
                      f"arena {size(program.arena_bytes)}"
    yield f"tools      {', '.join(f'{name} {version}' for name, version in manifest.tools.items())}"


def _level(artifact: Artifact, level: LevelInfo) -> Iterator[str]:
    params = ", ".join(f"{name} {value}" for name, value in level.params.items())
    weights = f"  weights {size(artifact.manifest.weights[level.weights][0])}" if level.weights else ""
    yield f"level      {level.name}: {level.kind}{weights}{'  ' + params if params else ''}"
    for file in dict.fromkeys(level.other_weights.values()):
        names = [name for name, other in level.other_weights.items() if other == file]
        own, found = artifact.path(file), artifact.level_weights(level.name, names[0])
        shared = sum(len(found.tensor(name)) for name, of in found.files.items() if of.path != own)
        more = artifact.manifest.weights[file][0]
        yield f"  weights  {', '.join(sorted(names))}: {size(more)} more, laid out for them; {size(shared)} are shared"
    if level.kv is not None:
        kv = level.kv
        yield f"  kv       {kv.format}: {kv.num_layers} layers x {kv.num_kv_heads} heads x {kv.head_dim}; page of {kv.page_size} tokens, " \
              f"{size(kv.page_bytes)}; {kv.bytes_per_token:.0f} bytes a token"


def memory(artifact: Artifact) -> Iterator[str]:
    """The memory plan, target by target: the table, each level's page, and what contexts cost."""
    for target in artifact.manifest.targets:
        plan = plan_artifact(artifact, target)
        most = plan.limits.max_model_len
        yield f"{artifact.root.name} on {target.name}"
        yield from plan.table()
        for level in plan.levels:
            if level.kv is not None:
                yield from _pages(level, plan.sequence_bytes(most))
        yield ""
        contexts = [context for context in CONTEXTS if context < most] + [most]
        yield f"{'context':>10} {'bytes':>14} {'of these drafts':>16} {'bits/element':>13} {'at once, drafting':>18} {'without':>8}"
        for context in contexts:
            whole, plain = plan.sequence_bytes(context), plan.sequence_bytes(context, drafts=False)
            kv = plan.levels[-1].kv
            bits = f"{effective_bits(kv, context, plan.levels[-1].window):.2f}" if kv else ""
            users, plain_users = plan.users(context), plan.users(context, drafts=False)
            yield f"{context:10,} {whole:14,} {whole - plain:16,} {bits:>13} {users:18,} {plain_users:8,}"
        yield f"{'':10} at once: what the pool holds; a step serves at most {plan.limits.max_num_seqs} (limits.max_num_seqs)"


def _pages(level: LevelPlan, sequence_bytes: int) -> Iterator[str]:
    """A level's page: what lies where in it, and what it costs."""
    kv = level.kv
    assert kv is not None
    share = level.sequence_bytes(level.max_model_len) / sequence_bytes
    yield ""
    yield f"{level.name}: {kv.format}, page of {kv.page_size} tokens, {kv.page_bytes:,} bytes; {kv.bytes_per_token:,.0f} bytes a token; " \
          f"{share:.0%} of a full sequence"
    for layers, first in _alike(kv):
        k, v, head = kv.layer_bytes(first)
        kinds = kv.layer_format(first)
        yield f"  {layers}: {kinds.name}, {kv.num_kv_heads} heads x (keys {k:,} + values {v:,}) bytes, a head every {head:,}, " \
              f"from byte {kv.k_offset(first, 0):,}"
    if level.window is not None:
        most = level.window.most_pages(level.max_model_len, level.most_rows, kv.page_size)
        yield f"  the first {level.window.sinks} and the last {level.window.window} tokens are kept: at most {most} pages of a sequence"
    yield f"  {level.scratch_pages} scratch page{'s' if level.scratch_pages != 1 else ''} for the drafted rows of a sequence"


def _alike(kv: KvGeometry) -> Iterator[tuple[str, int]]:
    """Runs of layers of one format: how a person names them, and the first."""
    start = 0
    for layer in range(1, kv.num_layers + 1):
        if layer == kv.num_layers or kv.layer_format(layer).name != kv.layer_format(start).name:
            yield f"layer {start}" if layer == start + 1 else f"layers {start} to {layer - 1}", start
            start = layer


def _programs(artifact: Artifact, level: LevelInfo, target: TargetInfo) -> dict[str, ProgramSpec]:
    return artifact.programs(level.name, target) if target.name in level.programs else {}


def kernels(artifact: Artifact) -> Iterator[str]:
    for target in artifact.manifest.targets:
        if target.device == "cuda":
            yield from gpu_kernels(artifact, target)
            continue
        for key, kernel in target.kernels.items():
            resources = "  ".join(f"{name} {value}" for name, value in kernel.resources.items())
            yield f"{key}"
            yield f"  {target.name}, {kernel.checked_by}; {kernel.source} -> {kernel.file}:{kernel.entry}  {resources}".rstrip()
            yield f"  {', '.join(kernel.abi)}"
    yield from beside(artifact)


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


def gpu_kernels(artifact: Artifact, target: TargetInfo) -> Iterator[str]:
    """What each kernel of a GPU takes, and its predicted share of a step of one sequence at its longest."""
    from mlsdc.compiler.roofline import Load
    from mlsdc.compiler.text_parse import parse_graph
    from mlsdc.targets.nvidia_show import kernel_table

    text = artifact.path(f"graph/{artifact.manifest.target_level.name}.ir").read_text(encoding="utf-8")
    graph = parse_graph(text.split("\ngraph ")[0])
    yield from kernel_table(artifact, target, graph, Load(1, 1, artifact.manifest.limits.max_model_len))


def shown(artifact: Artifact, key: str, what: str, name: str | None) -> str:
    """A kernel's source, or its PTX or machine code on a GPU. Raises MlsdcError."""
    targets = [t for t in artifact.manifest.targets if key in t.kernels and name in (None, t.name)]
    if not targets:
        raise MlsdcError(f"--kernel: no kernel '{key}'{f' of target {name!r}' if name else ''}; `mlsdc inspect ... --kernels` lists them")
    target, kernel = targets[0], targets[0].kernels[key]
    if what == "source":
        return artifact.path(kernel.source).read_text(encoding="utf-8")
    if target.device != "cuda":
        raise MlsdcError(f"--show {what}: target {target.name} is for {target.device}; GPU kernels have {what}")
    from mlsdc.targets import nvidia_show

    return nvidia_show.machine_code(artifact, kernel) if what == "sass" else nvidia_show.ptx(artifact, target, kernel)


def size(num_bytes: int) -> str:
    """Bytes as a person reads them: `23.6 MiB`."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value, unit = num_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"
