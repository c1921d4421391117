"""Cascades of every kind of level through a GPU program on Triton's interpreter, compared with the CPU's: texts, and every drafted tree.

`python -m tests.gpu.interpret_levels FOLDER CASE:KV ..`, as in `/tmp/x all:int8 alike:int8/int4+skip`; CASE is one of `cascade`'s, KV a
format or `keys/values`, with `+skip` layer 0 of the target stays bf16, with `+window` the smaller model's rows see its first and last
positions only. A case takes minutes. No cubin is built: the interpreter runs the kernels' sources, and other tests build cubins.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mlsdc.compiler import compile_model
from mlsdc.compiler.heads.config import EagleConfig, MedusaConfig
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.levels.base import Level, LevelState, Rounds
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.tree import Tree
from mlsdc.targets import nvidia_build
from tests.function_level import sends_all
from tests.gpu.tiny import PADDED_VOCAB, config, write_model
from tests.heads.tiny import write_heads, write_small

HIDDEN, DRAFT = 96, 64
HEADS = {  # heads of 32 channels: the narrowest that Triton's dots take
    "medusa": MedusaConfig(HIDDEN, HIDDEN, PADDED_VOCAB, DRAFT, 2, 1e-6, (2,), known_next=True),
    "eagle": EagleConfig(HIDDEN, HIDDEN, PADDED_VOCAB, DRAFT, (2,), 3, 1, 32, 128, 1e-6, 10000.0),
    "eagle3": EagleConfig(HIDDEN, HIDDEN, PADDED_VOCAB, DRAFT, (0, 1, 2), 3, 1, 32, 128, 1e-6, 10000.0, style="eagle3", own_head=True),
    "exit": MedusaConfig(HIDDEN, HIDDEN, PADDED_VOCAB, DRAFT, 1, 1e-6, (1,), first=1, own_norm=True, kind="exit"),
}
NOTHING = {"registers": 1, "stack_bytes": 0, "shared_bytes": 0, "tensor_ops": 0, "async_copies": 0, "threads": 32, "num_stages": 1,
           "elf_abi": 7, "min_driver": 525}
WINDOW = {"window": 64, "sinks": 4}  # of `+window`
PROMPTS = [list(b"one two one two, three"), list(b"zz")]
LONG = [list((b"one two one two, three and four " * 3)[:84])]  # fills pages of grouped formats, which have a tail of 64


@dataclass(frozen=True)
class Said:
    """`trees` are (tokens, parents) of every proposal of every level, in order; `accepted` by level."""

    texts: list[list[int]]
    trees: list[tuple[tuple[int, ...], tuple[int, ...]]]
    drafted: Mapping[str, int]
    accepted: Mapping[str, int]


def cascade(case: str, kv: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Items of `cascade` in model.yaml; files of random heads are written to `folder`, where `model` and `small` are checkpoints."""
    files = {name: str(write_heads(folder / f"{name}.safetensors", head)) for name, head in HEADS.items()}
    counts = {"kind": "ngram", "name": "counts", "max_nodes": 6, "min_probability": 0.01}
    medusa = {"kind": "medusa", "name": "medusa", "heads": files["medusa"], "max_nodes": 4}
    eagle = {"kind": "eagle", "name": "eagle", "heads": files["eagle"], "max_nodes": 5, "window": 64}
    eagle3 = {**eagle, "heads": files["eagle3"]}
    small = {"kind": "model", "name": "small", "model": str(folder / "small"), "max_nodes": 6, "depth": 3, "context": 96}
    twin = {**small, "name": "twin", "model": str(folder / "model"), "context": 128}
    first = {"kind": "self", "name": "first", "layers": 1, "exit": files["exit"], "max_nodes": 6, "depth": 3}
    return {
        "medusa": [medusa], "eagle": [eagle], "eagle3": [eagle3], "model": [small], "self": [first],
        "self-own": [{name: value for name, value in first.items() if name != "exit"}], "self-high": [{**first, "kv": "high"}],
        "merged": [{"merge": [counts, medusa, eagle3], "max_nodes": 8}], "stacked": [counts, small, first],
        "alike": [{**small, "kv": kv}, first],  # the smaller model's cache is of the target's format; the first layers read the target's
        "all": [{"merge": [counts, medusa, eagle3], "max_nodes": 6}, first, twin],
    }[case]


def write_checkpoints(folder: Path) -> None:
    for name in ("model", "small"):
        (folder / name).mkdir()
    write_model(folder / "model")
    write_small(folder / "small", num_attention_heads=2, num_key_value_heads=1)


@contextmanager
def without_cubins() -> Iterator[None]:
    """Kernels are generated and not built."""
    real = nvidia_build.fitting, nvidia_build.read_entry, nvidia_build.write_entry
    nvidia_build.fitting = lambda *args: (b"", dict(NOTHING))
    nvidia_build.read_entry, nvidia_build.write_entry = lambda entry: None, lambda entry, found: None
    try:
        yield
    finally:
        nvidia_build.fitting, nvidia_build.read_entry, nvidia_build.write_entry = real


def compile_case(case: str, kv: str, folder: Path, output: Path) -> None:
    """An artifact for h100 and this CPU; `folder` has the checkpoints."""
    kv, *more = kv.split("+")
    keys, _, values = kv.partition("/")
    page_size = 32 if keys in ("int4", "int3", "int2", "int8n") else 16
    format = {"keys": keys, "values": values} if values else {"dtype": keys}
    of_target: dict[str, Any] = {**format, "page_size": page_size}
    of_model: dict[str, Any] = {**format}
    if "skip" in more:
        of_target["skip_layers"] = [0]
    if "window" in more:
        of_model |= WINDOW
    raw = config(folder / "model", "h100,cpu", weights="bf16", kv=of_target)
    with without_cubins():
        compile_model({**raw, "cascade": cascade(case, of_model, folder), "memory": {"kv_pool": "4MiB"}}, output)


def say(artifact: Path, device: str, prompts: Sequence[list[int]], tokens: int) -> Said:
    """The first prompt greedily, a second one sampled; everything proposed is sent."""
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True),
              SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.8, seed=3)]
    trees: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    with Engine.load(artifact, device=device, num_pages=100, threads=1) as engine:
        level = sends_all(engine).drafting.level
        assert level is not None
        for one in [level] if level in engine.drafting.levels else [level, *engine.drafting.levels]:
            record(one, trees)
        results = engine.generate(list(prompts), params[: len(prompts)])
        engine.check_integrity()
        levels = engine.statistics.levels
    return Said([list(result.token_ids) for result in results], trees,
                {name: level.drafted for name, level in levels.items()}, {name: level.accepted for name, level in levels.items()})


def record(level: Level, trees: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """What the level proposes from now on goes to `trees`, too."""
    at_once, rounds, above = level.propose_all, level.propose_rounds, getattr(level, "propose_above", None)

    def keep(found: list[Tree]) -> list[Tree]:
        trees.extend((tuple(tree.tokens), tuple(tree.parents)) for tree in found)
        return found

    def in_rounds(states: Sequence[LevelState], budgets: Sequence[int]) -> Rounds[list[Tree]]:
        return keep((yield from rounds(states, budgets)))

    level.propose_all = lambda *args: keep(at_once(*args))  # type: ignore[method-assign]
    level.propose_rounds = in_rounds  # type: ignore[method-assign]
    if above is not None:
        level.propose_above = lambda *args: keep(above(*args))  # type: ignore[attr-defined]


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        write_checkpoints(folder)
    wrong = False
    for wanted in sys.argv[2:]:
        case, _, kv = wanted.partition(":")
        output = folder / f"{case}-{kv.replace('/', '_')}.mlsdc"
        shutil.rmtree(output, ignore_errors=True)
        start = time.perf_counter()
        compile_case(case, kv, folder, output)
        target = Artifact.open(output).manifest.target_level
        prompts = LONG if (target.kv is not None and target.kv.grouped) or "window" in kv else PROMPTS
        cpu, gpu = (say(output, device, prompts, 6) for device in ("cpu", "interpret"))
        texts, trees = cpu.texts == gpu.texts, sum(one != other for one, other in zip_longest(cpu.trees, gpu.trees))
        wrong |= not texts or trees > 0
        print(f"{wanted}: texts {'same' if texts else f'DIFFER {cpu.texts} {gpu.texts}'}; {len(gpu.trees)} trees, {trees} differ; "
              f"drafted {gpu.drafted}, accepted {gpu.accepted}; {time.perf_counter() - start:.0f} s", flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
