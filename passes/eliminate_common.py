"""eliminate-common: what is computed twice is computed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Input
from mlsdc.compiler.ops import Op
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import note
from mlsdc.compiler.types import Type

EQUATION = "f(x), f(x) => f(x)"


@dataclass(frozen=True)
class EliminateCommon(GraphPass):
    """Before::

        %a = unary(%x, fn="cos")    %b = unary(%x, fn="cos")    %c = binary(%a, %b, fn="mul")

    After (the first of equals stays)::

        %a = unary(%x, fn="cos")    %c = binary(%a, %a, fn="mul")

    Two weight nodes are the same when their checkpoint tensors and types are: tied embeddings become one node. Writes to the cache
    are values like others, so two equal ones are one.

    Declines: inputs; ops that differ in any attribute; the same inputs in another order.
    """

    name: ClassVar[str] = "eliminate-common"

    def rewrite(self, graph: Graph) -> Graph:
        editor = Editor(graph)
        first: dict[tuple[Op, tuple[str, ...], Type], str] = {}
        for name in [node.name for node in graph if not isinstance(node.op, Input)]:
            node = editor[name]  # its inputs as they are now, after the nodes before it
            kept = first.setdefault((node.op, node.inputs, node.type), name)
            if kept != name:
                editor.redirect(name, kept)
                note(EQUATION, graph.name, name)
        return editor.finish() if len(first) < len(graph) - len(graph.inputs()) else graph
