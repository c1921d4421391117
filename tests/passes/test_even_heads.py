"""even-heads: one shape of cache for layers that differ, with the same numbers."""

from __future__ import annotations

import torch

from mlsdc.compiler.graph import Builder, Graph
from mlsdc.compiler.interpret import interpret
from mlsdc.compiler.ops_nn import Attention
from mlsdc.compiler.text import print_graph
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.passes.even_heads import EvenHeads

ROWS = Dim("rows", 1, 16)


def layers(*counts: tuple[int, int]) -> Graph:
    b = Builder("g")
    made = {}
    for i, (query, kv) in enumerate(counts):
        q, k, v = (b.input(f"{name}{i}", TensorType(DType.F32, (ROWS, heads, 16))) for name, heads in (("q", query), ("k", kv), ("v", kv)))
        made[f"y{i}"] = b.add(f"a{i}", Attention(0.25), q, k, v)
    return b.build(**made)


def test_fewer_heads_are_padded_and_dropped_again() -> None:
    printed = print_graph(EvenHeads().rewrite(layers((4, 2), (9, 3)))).splitlines()
    assert [" ".join(line.split()) for line in printed if "a0" in line or "even" in line] == [
        "%q0.even = pad_heads(%q0, heads=6) : f32[rows, 6, 16]",
        "%k0.even = pad_heads(%k0, heads=3) : f32[rows, 3, 16]",
        "%v0.even = pad_heads(%v0, heads=3) : f32[rows, 3, 16]",
        "%a0.even = attention(%q0.even, %k0.even, %v0.even, scale=0.25) : f32[rows, 6, 16]",
        "%a0 = slice(%a0.even, axis=1, start=0, end=4) : f32[rows, 4, 16]",
        "return y0=%a0, y1=%a1",
    ]


def test_the_numbers_stay() -> None:
    before = layers((4, 2), (9, 3))
    generator = torch.Generator().manual_seed(0)
    inputs = {node.name: torch.randn(7, *node.type.shape[1:], generator=generator) for node in before.inputs()}  # type: ignore[union-attr]
    wanted = interpret(before, inputs, lambda node: None)
    found = interpret(EvenHeads().rewrite(before), inputs, lambda node: None)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)  # type: ignore[arg-type]


def test_layers_that_agree_are_left_alone() -> None:
    graph = layers((4, 2), (8, 2))
    assert EvenHeads().rewrite(graph) is graph
