"""Cascades with levels that compute through a GPU program on Triton's interpreter, compared with the CPU's: texts, and every drafted tree.
What tests take; every kind of level over every format is interpret_formats.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlsdc.compiler import compile_model
from mlsdc.compiler.heads.config import EagleConfig, MedusaConfig
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
PROMPTS = [list(b"one two one two, three"), list(b"zz")]


@dataclass(frozen=True)
class Said:
    """`trees` are (tokens, parents) of every proposal of every level, one level after the other; `accepted` by level."""

    texts: list[list[int]]
    trees: list[tuple[tuple[int, ...], tuple[int, ...]]]
    drafted: Mapping[str, int]
    accepted: Mapping[str, int]


def levels_of(folder: Path, kv: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Items of `cascade` in model.yaml by name, one of every kind; files of random heads are written to `folder`, where `model` and `small`
    are checkpoints. `kv`: of the levels that have a cache of their own and a choice."""
    files = {name: str(write_heads(folder / f"{name}.safetensors", head)) for name, head in HEADS.items()}
    eagle = {"kind": "eagle", "max_nodes": 5, "depth": 3, "window": 64}
    small = {"kind": "model", "model": str(folder / "small"), "max_nodes": 6, "depth": 3, "context": 96, "kv": dict(kv)}
    first = {"kind": "self", "layers": 1, "max_nodes": 6, "depth": 3}
    items: dict[str, dict[str, Any]] = {
        "counts": {"kind": "ngram", "max_nodes": 6, "min_probability": 0.01},
        "medusa": {"kind": "medusa", "heads": files["medusa"], "max_nodes": 4},
        "eagle": {**eagle, "heads": files["eagle"]}, "eagle3": {**eagle, "heads": files["eagle3"]},
        "small": small, "twin": {**small, "model": str(folder / "model"), "context": 128},  # the twin has the target's weights
        "first": {**first, "exit": files["exit"]}, "bare": first, "high": {**first, "kv": "high"},
    }
    return {name: {**item, "name": name} for name, item in items.items()}


def cascade(case: str, folder: Path) -> list[dict[str, Any]]:
    """What tests take of them."""
    level = levels_of(folder, {})
    merged = [level["counts"], level["medusa"], {**level["eagle3"], "name": "eagle"}]
    return {"merged": [{"merge": merged, "max_nodes": 8}], "all": [{"merge": merged, "max_nodes": 6}, level["first"], level["twin"]]}[case]


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
    raw = config(folder / "model", "h100,cpu", weights="bf16", kv={"dtype": kv, "page_size": 16})
    with without_cubins():
        compile_model({**raw, "cascade": cascade(case, folder), "memory": {"kv_pool": "4MiB"}}, output)


def say(artifact: Path, device: str, prompts: Sequence[list[int]], tokens: int) -> Said:
    """The first prompt greedily, a second one sampled; everything proposed is sent."""
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True),
              SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.8, seed=3)]
    trees: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = []  # by level: what was made ahead is there before what is made now
    with Engine.load(artifact, device=device, num_pages=100, threads=1) as engine:
        level = sends_all(engine).drafting.level
        assert level is not None
        for one in [level] if level in engine.drafting.levels else [level, *engine.drafting.levels]:
            trees.append([])
            record(one, trees[-1])
        results = engine.generate(list(prompts), params)
        engine.check_integrity()
        levels = engine.statistics.levels
    return Said([list(result.token_ids) for result in results], [tree for of_level in trees for tree in of_level],
                {name: level.drafted for name, level in levels.items()}, {name: level.accepted for name, level in levels.items()})


def record(level: Level, trees: list[tuple[tuple[int, ...], tuple[int, ...]]], whole: list[Tree] | None = None) -> None:
    """What the level proposes from now on goes to `trees`, too, and to `whole` with all that is said of it."""
    at_once, rounds, above = level.propose_all, level.propose_rounds, getattr(level, "propose_above", None)

    last: list[Tree] = []

    def keep(found: list[Tree]) -> list[Tree]:
        nonlocal last
        if found is not last:  # one way to propose may be by another
            trees.extend((tuple(tree.tokens), tuple(tree.parents)) for tree in found)
            if whole is not None:
                whole.extend(found)
        last = found
        return found

    def in_rounds(states: Sequence[LevelState], budgets: Sequence[int]) -> Rounds[list[Tree]]:
        return keep((yield from rounds(states, budgets)))

    level.propose_all = lambda *args: keep(at_once(*args))  # type: ignore[method-assign]
    level.propose_rounds = in_rounds  # type: ignore[method-assign]
    if above is not None:
        level.propose_above = lambda *args: keep(above(*args))  # type: ignore[attr-defined]
