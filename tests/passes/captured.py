"""Captured graphs for the raising passes' tests: read from tests/golden, so that they need no transformers, and run on random weights."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from mlsdc.compiler.graph import Graph, Node, Weight
from mlsdc.compiler.interpret import interpret
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.text import parse_graph, print_graph
from mlsdc.compiler.types import TensorType
from mlsdc.passes.raise_attention import RaiseAttention
from mlsdc.passes.raise_names import RaiseNames
from mlsdc.passes.raise_norm import RaiseNorm
from mlsdc.passes.raise_rope import RaiseRope
from mlsdc.passes.rowify import Rowify

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
RAISING: tuple[GraphPass, ...] = (RaiseNorm(), RaiseRope(), RaiseAttention(), Rowify(64, 32), RaiseNames())
TOKENS = torch.tensor([5, 17, 3, 90, 41, 41, 2, 8, 60])


def check_golden(name: str, graph: Graph) -> None:
    """The graph's text is tests/golden/<name>.ir; `UPDATE_GOLDEN=1` writes it."""
    path, text = GOLDEN / f"{name}.ir", print_graph(graph)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; if that is meant, set UPDATE_GOLDEN=1"


def captured(attention: str = "sdpa") -> Graph:
    """A Llama of one layer as torch.export gives it."""
    return parse_graph((GOLDEN / f"captured-{attention}.ir").read_text(encoding="utf-8"))


def before(name: str, attention: str = "sdpa") -> tuple[Graph, GraphPass]:
    """The graph as the pass called `name` gets it, and the pass."""
    graph = captured(attention)
    for pass_ in RAISING:
        if pass_.name == name:
            return graph, pass_
        graph = pass_.rewrite(graph)
    raise ValueError(f"no pass '{name}'")


def weights(node: Node) -> torch.Tensor:
    """Random values, the same for the same source in every graph."""
    assert isinstance(node.op, Weight)
    assert isinstance(node.type, TensorType)
    shape = [size for size in node.type.shape if isinstance(size, int)]
    generator = torch.Generator().manual_seed(zlib.crc32(node.op.sources[0].encode()))
    return torch.randn(shape, generator=generator) * 0.3 + (1.0 if len(shape) == 1 else 0.0)


def logits(graph: Graph, tokens: torch.Tensor = TOKENS, out_rows: Sequence[int] | None = None) -> torch.Tensor:
    """[seq, vocab] of a captured graph or a row program."""
    rows = torch.arange(len(tokens), dtype=torch.int32)
    picked = rows if out_rows is None else torch.tensor(out_rows, dtype=torch.int32)
    row_inputs = {"tokens": tokens.int(), "positions": rows, "out_rows": picked}
    inputs = row_inputs if "out_rows" in graph.by_name else {"tokens": tokens[None].int()}
    found = interpret(graph, inputs, weights)["logits"]
    assert isinstance(found, torch.Tensor)
    return found if found.dim() == 2 else found[0]


def assert_close(a: Graph, b: Graph) -> None:
    torch.testing.assert_close(logits(a), logits(b), rtol=1e-4, atol=1e-4)
