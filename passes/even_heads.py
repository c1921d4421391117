"""even-heads: layers whose heads differ in number get one shape of cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node
from mlsdc.compiler.ops_core import Slice
from mlsdc.compiler.ops_nn import Attention, PadHeads
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import note
from mlsdc.compiler.types import TensorType
from mlsdc.passes.names import free


@dataclass(frozen=True)
class EvenHeads(GraphPass):
    """attention(q, k, v) => slice(attention(pad(q), pad(k), pad(v))) where other layers have more kv heads.

    Before::

        # the most kv heads of a layer are 5
        %a = attention(%q, %k, %v) : f32[rows, 12, 64]          with %k : f32[rows, 3, 64]

    After::

        %a.even = attention(pad_heads(%q, heads=20), pad_heads(%k, heads=5), pad_heads(%v, heads=5))
        %a = slice(%a.even, axis=1, start=0, end=12)

    One page shape serves a level (insert-paged-kv). Heads of zeros see nothing and are dropped. Declines: layers that agree; a head_dim
    that differs.
    """

    name: ClassVar[str] = "even-heads"

    def rewrite(self, graph: Graph) -> Graph:
        layers = [node for node in graph if isinstance(node.op, Attention)]
        counts = {heads(graph, node, 1) for node in layers}
        if len(counts) < 2 or len({size(graph, node) for node in layers}) > 1:
            return graph
        editor, most = Editor(graph), max(counts)
        for node in layers:
            own = heads(graph, node, 1)
            if own < most:
                pad(editor, node, heads(graph, node, 0), own, most)
                note("attention(q, k, v) => slice(attention(pad(q), pad(k), pad(v)))", graph.name, node.name)
        return editor.finish()


def pad(editor: Editor, node: Node, query_heads: int, kv_heads: int, most: int) -> None:
    wanted = (query_heads // kv_heads * most, most, most)
    padded = [
        editor.add(free(editor, f"{value}.even"), PadHeads(count), value, origin=node.origin)
        for value, count in zip(node.inputs, wanted, strict=True)]
    whole = editor.add(free(editor, f"{node.name}.even"), node.op, *padded, origin=node.origin)
    editor.replace(node.name, Slice(1, 0, query_heads), whole)


def heads(graph: Graph, node: Node, index: int) -> int:
    type_ = graph[node.inputs[index]].type
    assert isinstance(type_, TensorType)
    assert isinstance(type_.shape[1], int)
    return type_.shape[1]


def size(graph: Graph, node: Node) -> object:
    type_ = graph[node.inputs[1]].type
    assert isinstance(type_, TensorType)
    return type_.shape[2]
