"""eliminate-dead: values that no output needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import note

EQUATION = "a value that no output needs =>"


@dataclass(frozen=True)
class EliminateDead(GraphPass):
    """Before::

        %a = unary(%x, fn="exp")    %b = unary(%x, fn="cos")    return y=%a

    After::

        %a = unary(%x, fn="exp")    return y=%a

    Declines: inputs, used or not. They are the step's signature.
    """

    name: ClassVar[str] = "eliminate-dead"

    def rewrite(self, graph: Graph) -> Graph:
        changed = Editor(graph).finish()
        dead = [node.name for node in graph if node.name not in changed.by_name]
        for name in dead:
            note(EQUATION, graph.name, name)
        return changed if dead else graph
