"""Every kind of level over every cache format through a GPU program on Triton's interpreter, compared with the CPU's.

`python -m tests.gpu.interpret_formats FOLDER [KV ..]`, as in `/tmp/x int8 fp8/int4+skip`; without formats all of FORMATS. A KV is a format
or `keys/values`; with `+skip` layer 0 of the target stays bf16, with `+window` the target's rows and those of the models below it see their
first and last positions only.

A format is one artifact for h100 and this CPU that has all levels, and one batch: a request for each of KINDS, whose levels alone may draft
for it. The cache of a model below the target is of the target's format, too. Everything proposed is sent. Compared are the tokens, every
tree of every level, and what was offered and taken at each depth. Prints a line a format and exits with 1 if anything differs, if a kind
drafted no tree of two depths, or if nothing was accepted. A level whose activations are quantised says log probabilities that differ by
hundredths: where two paths lie closer than TIE, the other one may come first, which is counted and no difference. No cubin is built: the
interpreter runs the kernels' sources.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlsdc.compiler import compile_model
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.request import Request
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from mlsdc.runtime.tree import Tree
from tests.function_level import sends_all
from tests.gpu.interpret_levels import HEADS, levels_of, record, without_cubins, write_checkpoints
from tests.gpu.tiny import config
from tests.heads.tiny import write_heads

FORMATS = ("bf16", "int8", "fp8", "int8n", "int4-token", "int4", "int3", "int2", "fp8/int4+skip", "int4+window")
AGAIN = b"o"  # what the request of `counts` is made to say: counts of a text that nobody repeats make no deep trees
GROUPED = {"int4", "int3", "int2"}
KINDS: Mapping[str, tuple[str, ...]] = {  # levels that draft for a request; cheapest first, each judges those before it
    "counts": ("counts",), "medusa": ("medusa",), "eagle": ("eagle",), "eagle3": ("eagle3",), "model": ("twin",), "exit": ("first",),
    "no exit": ("bare",), "high": ("high",), "merged": ("counts", "medusa", "eagle", "eagle3"), "stacked": ("counts", "twin", "first"),
    "all": ("counts", "medusa", "eagle", "eagle3", "twin", "first", "bare", "high"),
}
STEPS = 2  # that draft: from the prompt, and from what the first one committed, a part of its tree
NODES = 4  # of a level's tree: rows are what the interpreter takes its time for
SHARP = 3.0  # times the heads' weights: a random model is sure of nothing, and its trees are flat
LIMITS = {"max_model_len": 224, "max_num_seqs": len(KINDS), "max_num_batched_tokens": 96, "max_logit_rows": 96}
TIE = 0.04  # of a path's log probability


@dataclass(frozen=True)
class Cache:
    """What a KV of the command line says."""

    name: str

    @property
    def halves(self) -> tuple[str, str]:
        keys, _, values = self.name.partition("+")[0].partition("/")
        return keys, values or keys

    @property
    def windowed(self) -> bool:
        return "window" in self.name

    def of_target(self) -> dict[str, Any]:
        keys, values = self.halves
        page_size = 32 if (GROUPED | {"int8n"}) & {keys, values} else 16
        return {"keys": keys, "values": values, "page_size": page_size, "skip_layers": [0] if "skip" in self.name else [],
                **({"eviction": {"kind": "window", "budget": 128, "sinks": 4}} if self.windowed else {})}

    def of_model(self) -> dict[str, Any]:
        keys, values = self.halves
        return {"keys": keys, "values": values, **({"window": 64, "sinks": 4} if self.windowed else {})}

    def prompts(self) -> list[list[int]]:
        """One a kind. The common beginning of most ends where a prefix can be reused; groups of grouped formats are full there and a window
        is left. Where several levels begin, the prompt is short and nobody else's: heads see the target's states of all."""
        keys, values = self.halves
        length = 160 if self.windowed else 96 if GROUPED & {keys, values} else 32
        text, own = (b"one two one two, three and four five one two " * 4)[:length], b"one two three one two"
        mine = {"counts": [*text, *AGAIN * 3]}
        return [mine.get(kind, [i, *own] if len(levels) > 1 else [*text, 97 + i]) for i, (kind, levels) in enumerate(KINDS.items())]


@dataclass(frozen=True)
class Ran:
    """Of each kind its tokens and, by level, (offered, accepted) at each depth; of each level all it proposed."""

    tokens: Mapping[str, Sequence[int]]
    depths: Mapping[str, Mapping[str, Sequence[tuple[int, int]]]]
    trees: Mapping[str, Sequence[Tree]]

    def deepest(self, kind: str) -> int:
        return max((len(depths) for depths in self.depths[kind].values()), default=0)

    @property
    def accepted(self) -> int:
        return sum(taken for of_level in self.depths.values() for depths in of_level.values() for _, taken in depths)


def write_sharp(folder: Path) -> None:
    """Checkpoints that are surer of what they guess."""
    from safetensors.torch import load_file, save_file

    write_checkpoints(folder)
    for file in folder.glob("*/*.safetensors"):
        tensors = load_file(file)
        tensors["lm_head.weight"] *= SHARP
        save_file(tensors, file, {"format": "pt"})


def compile_format(cache: Cache, folder: Path, output: Path) -> None:
    """An artifact for h100 and this CPU with all levels; `folder` has the checkpoints."""
    import numpy as np

    level = {name: {**item, "max_nodes": NODES} for name, item in levels_of(folder, cache.of_model()).items()}
    draft, hidden = HEADS["eagle3"].shapes()["lm_head"]
    head = np.random.default_rng(1).standard_normal((draft, hidden)) * SHARP / hidden ** 0.5
    write_heads(folder / "eagle3.safetensors", HEADS["eagle3"], lm_head=head)
    merge = {"merge": [level[name] for name in KINDS["merged"]], "max_nodes": 2 * NODES}
    high = [level["high"]] if cache.halves[0] == "int8n" else []
    above = [{**level["twin"], "context": LIMITS["max_model_len"]}, level["first"], level["bare"], *high]
    raw = config(folder / "model", "h100,cpu", weights="bf16", kv=cache.of_target())
    with without_cubins():
        compile_model({**raw, "cascade": [merge, *above], "memory": {"kv_pool": "16MiB"}, "limits": LIMITS}, output)


def run(artifact: Path, device: str, cache: Cache) -> Ran:
    """Requests of even kinds greedily, the others sampled."""
    trees: dict[str, list[Tree]] = {}
    with Engine.load(artifact, device=device, threads=1) as engine:
        level = sends_all(engine).drafting.level
        assert level is not None
        names = {one.name for one in engine.drafting.levels}
        for one in (level, *engine.drafting.levels):
            record(one, [], trees.setdefault(one.name, []))
        prompts = dict(zip(KINDS, cache.prompts(), strict=True))
        engine.generate([prompts["counts"]], SamplingParams(max_tokens=1, speculation=Speculation(enabled=False)))  # the common beginning
        requests: dict[str, Request] = {}
        for i, (kind, levels) in enumerate(KINDS.items()):
            if drafting := tuple(name for name in levels if name in names):
                requests[kind] = engine.submit(prompts[kind], SamplingParams(
                    max_tokens=48, ignore_eos=True, temperature=0.8 * (i % 2), seed=3, speculation=Speculation(levels=drafting),
                    logit_bias={AGAIN[0]: 100.0} if kind == "counts" else {}))
        while any(len(request.tokens) == request.num_prompt for request in requests.values()):
            engine.step()
        for _ in range(STEPS):
            engine.step()
        engine.check_integrity()
        depths = {kind: {name: [(depth.offered, depth.accepted) for depth in level.depths]
                         for name, level in request.statistics.levels.items()} for kind, request in requests.items()}
        return Ran({kind: request.tokens[request.num_prompt :] for kind, request in requests.items()}, depths, trees)


def shape(tree: Tree) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(tree.tokens), tuple(tree.parents)


def paths(tree: Tree) -> dict[tuple[int, ...], float]:
    """Path of tokens -> its log probability."""
    found: list[tuple[tuple[int, ...], float]] = []
    for node, parent in enumerate(tree.parents):
        above, total = found[parent] if parent >= 0 else ((), 0.0)
        found.append(((*above, tree.tokens[node]), total + (tree.logq[node] if tree.logq else 0.0)))
    return dict(found)


def tied(one: Tree, other: Tree) -> bool:
    """Whether two trees differ only in which of two paths came first, or in at all, that are as likely but for TIE."""
    mine, others = paths(one), paths(other)
    pairs = [(mine[path], others[path]) for path in mine.keys() & others.keys()] + list(zip(*map(sorted, (mine.values(), others.values())),
                                                                                           strict=False))
    return len(mine) == len(others) and all(abs(x - y) <= TIE for x, y in pairs)


def compared(cpu: Ran, gpu: Ran) -> tuple[list[str], int]:
    """What is wrong, a line each, and how many trees differ at a tie."""
    ties = 0
    found = [f"{kind}: {what} {of_cpu} on the CPU, {of_gpu} here" for kind in cpu.tokens for what, of_cpu, of_gpu in (
        ("tokens", cpu.tokens[kind], gpu.tokens[kind]), ("depths", cpu.depths[kind], gpu.depths[kind])) if of_cpu != of_gpu]
    for name, trees in cpu.trees.items():
        pairs = list(enumerate(zip(trees, gpu.trees[name], strict=False)))
        near = {i for i, (tree, other) in pairs if shape(tree) != shape(other) and tied(tree, other)}
        ties += len(near)
        differ = [i for i, (tree, other) in pairs if shape(tree) != shape(other) and i not in near]
        if differ or len(trees) != len(gpu.trees[name]):
            found.append(f"level {name}: {len(differ)} of {len(trees)} trees differ, {len(gpu.trees[name])} here, first at {differ[:1]}")
    found += [f"{kind}: no tree of two depths" for kind in cpu.tokens if cpu.deepest(kind) < 2]
    return found if cpu.accepted else [*found, "nothing was accepted"], ties


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        write_sharp(folder)
    wrong = False
    for name in sys.argv[2:] or FORMATS:
        cache, output = Cache(name), folder / f"{name.replace('/', '_')}.mlsdc"
        shutil.rmtree(output, ignore_errors=True)
        start = time.perf_counter()
        compile_format(cache, folder, output)
        cpu, gpu = (run(output, device, cache) for device in ("cpu", "interpret"))
        found, ties = compared(cpu, gpu)
        wrong |= bool(found)
        trees = [tree for of_level in gpu.trees.values() for tree in of_level if tree]
        deepest = " ".join(str(gpu.deepest(kind)) for kind in gpu.tokens)
        print(f"{name}: {len(gpu.tokens)} kinds, {len(trees)} trees, {sum(map(len, trees))} nodes, depths {deepest}, "
              f"{gpu.accepted} accepted, {sum(map(len, gpu.tokens.values()))} tokens: {'; '.join(found) or 'all the same'}"
              f"{f' but for {ties} at ties' if ties else ''}; "
              f"{time.perf_counter() - start:.0f} s", flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
