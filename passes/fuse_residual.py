"""fuse-residual: a linear adds the residual stream while it stores its result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node
from mlsdc.compiler.ops_core import Binary
from mlsdc.compiler.ops_quant import LinearF8, LinearQ
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import Rule, apply_rules


@dataclass(frozen=True)
class FuseResidual(GraphPass):
    """x + linear_q(h, w) => linear_q(h, w, x), in either order of the operands; linear_f8 likewise.

    Before::

        %down = linear_q(%h, %w.down)    %residual = binary(%x, %down, fn="add")

    After::

        %residual = linear_q(%h, %w.down, %x, residual=true)

    Declines: a linear that somebody else reads or that has a residual already; an addition that broadcasts.
    """

    name: ClassVar[str] = "fuse-residual"

    def rewrite(self, graph: Graph) -> Graph:
        return apply_rules(graph, RULES)[0]


def fuse(editor: Editor, add: Node) -> bool:
    """Of two linears the right one takes the left one as its residual."""
    if add.op != Binary("add") or add.inputs[0] == add.inputs[1]:
        return False
    for index in (1, 0):
        linear, x = editor.producer(add, index, LinearQ) or editor.producer(add, index, LinearF8), add.inputs[1 - index]
        if linear is None or editor.only_user(linear.name) is None or editor[x].type != linear.type:
            continue
        assert isinstance(linear.op, LinearQ | LinearF8)
        if not linear.op.residual:
            editor.replace(add.name, replace(linear.op, residual=True), *linear.inputs, x)
            return True
    return False


RULES = (Rule("x + linear_q(h, w) -> linear_q(h, w, x)", Binary, fuse),)
