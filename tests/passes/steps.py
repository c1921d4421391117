"""Running passes on the small Llamas: the graph before a pass, after it, and what both compute."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlsdc.compiler.graph import Editor, Graph
from mlsdc.compiler.interpret import KvState, Value
from mlsdc.compiler.pipeline import Pass, run_pipeline
from mlsdc.compiler.text import print_module
from mlsdc.passes import PassOptions, default_pipeline
from mlsdc.runtime.step import Limits
from mlsdc.runtime.tree import Tree
from tests.passes.graphs import MAX_LEN, PAGE, TINY, Llama, Weights, module_of, prefill, random_tokens, row_program, run, verify

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
FUSIONS = ("fuse-attention", "fuse-norm-quantise", "fuse-qkv", "fuse-gate-up", "fuse-residual")
TREE = Tree((5, 6, 7, 8), (-1, 0, 0, 1))


def pipeline(**options: Any) -> tuple[Pass, ...]:
    limits = Limits(max_model_len=MAX_LEN, max_num_seqs=4, max_num_batched_tokens=64, max_logit_rows=64, max_tree_nodes=15)
    return default_pipeline(PassOptions(limits, kv_page_size=PAGE, **options))


def middle(**options: Any) -> tuple[Pass, ...]:
    """The passes behind capture and raising: the row programs here are what those give."""
    names = [pass_.name for pass_ in pipeline()]
    return tuple(pass_ for pass_ in pipeline(**options) if names.index(pass_.name) > names.index("raise-names"))


def apply(graph: Graph, *passes: Pass) -> Graph:
    return run_pipeline(module_of(graph), passes).target.graphs["forward"]


def before(name: str, shape: Llama = TINY, **options: Any) -> tuple[Graph, Pass]:
    """The graph as the pass called `name` gets it, and the pass."""
    graph = row_program(shape)
    for pass_ in middle(**options):
        if pass_.name == name:
            return graph, pass_
        graph = apply(graph, pass_)
    raise ValueError(f"no pass '{name}'")


def compiled(shape: Llama = TINY, **options: Any) -> Graph:
    return apply(row_program(shape), *middle(**options))


def also_output(graph: Graph, *names: str) -> Graph:
    """The graph with more outputs: somebody else reads these values."""
    editor = Editor(graph)
    editor.outputs += [(f"extra.{name}", name) for name in names]
    return editor.finish()


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op.opname for node in graph)


def results(graph: Graph, shape: Llama, tree: Tree = TREE, num_tokens: int = 11) -> list[dict[str, Value]]:
    """What the graph gives for a prompt, and, if it has a cache, for a verify of `tree` after it."""
    weights, tokens = Weights(row_program(shape)), random_tokens(num_tokens + 1, shape.vocab)
    first = run(graph, weights, prefill(tokens[:-1]))
    if "kv" not in first:
        return [first]
    kv = first["kv"]
    assert isinstance(kv, KvState)
    return [first, run(graph, weights, verify(num_tokens, tokens[-1], tree), kv)]


def assert_same(a: list[dict[str, Value]], b: list[dict[str, Value]]) -> None:
    """Every output of every step, bit for bit; of a cache, the bytes."""
    for left, right in zip(a, b, strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            other = right[name]
            if isinstance(value, KvState):
                assert isinstance(other, KvState)
                assert np.array_equal(value.pool, other.pool), name
            else:
                assert torch.equal(value, other), name


def relative_error(found: Any, wanted: Any) -> float:
    return float((found - wanted).norm() / wanted.norm())


def golden(name: str, shape: Llama) -> None:
    """The module after the pass called `name` is tests/golden/<name>.ir. `UPDATE_GOLDEN=1 pytest tests/passes` writes the files."""
    golden_of(name, *before(name, shape))


def golden_of(name: str, graph: Graph, pass_: Pass) -> None:
    """The same for a graph and a pass made by hand."""
    text = print_module(replace(run_pipeline(module_of(graph), [pass_]), name=name))
    path = GOLDEN / f"{name}.ir"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; if that is meant, set UPDATE_GOLDEN=1"
