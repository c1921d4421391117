"""fuse-residual: a linear adds the residual stream while it stores its result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node
from mlsdc.compiler.ops_core import Binary
from mlsdc.compiler.ops_quant import LinearQ
from mlsdc.compiler.pipeline import GraphPass


@dataclass(frozen=True)
class FuseResidual(GraphPass):
    """x + linear_q(h, w) => linear_q(h, w, x), in either order of the operands.

    Before::

        %down = linear_q(%h, %w.down)    %residual = binary(%x, %down, fn="add")

    After::

        %residual = linear_q(%h, %w.down, %x, residual=true)

    Declines: a linear that somebody else reads or that has a residual already; an addition that broadcasts.
    """

    name: ClassVar[str] = "fuse-residual"

    def rewrite(self, graph: Graph) -> Graph:
        editor = Editor(graph)
        for node in graph:
            match = match_residual(editor, node)
            if match is not None:
                linear, x = match
                assert isinstance(linear.op, LinearQ)
                editor.replace(node.name, replace(linear.op, residual=True), *linear.inputs, x)
        return editor.finish()


def match_residual(editor: Editor, add: Node) -> tuple[Node, str] | None:
    """(linear, x) of x + linear, else None. Of two linears the right one takes the left one as its residual."""
    if add.op != Binary("add") or add.inputs[0] == add.inputs[1]:
        return None
    for index in (1, 0):
        linear, x = editor.producer(add, index, LinearQ), add.inputs[1 - index]
        if linear is None or editor.only_user(linear.name) is None or editor[x].type != linear.type:
            continue
        assert isinstance(linear.op, LinearQ)
        if not linear.op.residual:
            return linear, x
    return None
