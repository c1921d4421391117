"""fold-constants: ops that do nothing, and chains that are one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node
from mlsdc.compiler.ops import Mismatch
from mlsdc.compiler.ops_core import Cast, Cat, Expand, Reshape, Scalar, Slice, Transpose, axis_of
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import Rule, apply_rules
from mlsdc.compiler.types import TensorType


@dataclass(frozen=True)
class FoldConstants(GraphPass):
    """Before::

        %a = scalar(%x, fn="mul", value=1.0)    %b = reshape(%a, shape=[4, 8])    %c = reshape(%b, shape=[32])
        %d = scalar(%c, fn="mul", value=2.0)    %e = scalar(%d, fn="mul", value=3.0)    %f = transpose(%e, a=0, b=0)

    After::

        %c = reshape(%x, shape=[32])
        %e = scalar(%c, fn="mul", value=6.0)

    Declines: a reshape, cast, expand, slice or cat that changes the type; a cast there and back (it rounds); chains of scalars
    other than mul of mul and add of add; a value in the middle of a chain that somebody else reads.
    """

    name: ClassVar[str] = "fold-constants"

    def rewrite(self, graph: Graph) -> Graph:
        return apply_rules(graph, RULES)[0]


def drop_identity(editor: Editor, node: Node) -> bool:
    """The op's one input, if it has the type of the result; for ops of which that makes them an identity."""
    (x,) = node.inputs if len(node.inputs) == 1 else (None,)
    if x is None or editor[x].type != node.type:
        return False
    editor.redirect(node.name, x)
    return True


def drop_transpose(editor: Editor, node: Node) -> bool:
    assert isinstance(node.op, Transpose)
    rank = node.type.rank if isinstance(node.type, TensorType) else 0
    pair = {axis_of(node.op.a, rank), axis_of(node.op.b, rank)}
    inner = editor.producer(node, 0, Transpose)
    if len(pair) == 1:
        editor.redirect(node.name, node.inputs[0])
        return True
    if inner is None or not isinstance(inner.op, Transpose) or {axis_of(inner.op.a, rank), axis_of(inner.op.b, rank)} != pair:
        return False
    editor.redirect(node.name, inner.inputs[0])
    return True


def drop_scalar(editor: Editor, node: Node) -> bool:
    assert isinstance(node.op, Scalar)
    if (node.op.fn, node.op.value) not in (("mul", 1.0), ("div", 1.0), ("pow", 1.0)):  # x + 0 turns -0 into 0
        return False
    editor.redirect(node.name, node.inputs[0])
    return True


def fold_scalars(editor: Editor, node: Node) -> bool:
    outer, inner = node.op, editor.producer(node, 0, Scalar)
    assert isinstance(outer, Scalar)
    if inner is None or not isinstance(inner.op, Scalar) or editor.only_user(inner.name) is None:
        return False
    if inner.op.fn != outer.fn or outer.fn not in ("mul", "add"):
        return False
    value = inner.op.value * outer.value if outer.fn == "mul" else inner.op.value + outer.value
    editor.replace(node.name, Scalar(outer.fn, value), *inner.inputs)
    return True


def fold_reshapes(editor: Editor, node: Node) -> bool:
    inner = editor.producer(node, 0, Reshape)
    if inner is None or editor.only_user(inner.name) is None:
        return False
    try:
        if node.op.infer(editor[inner.inputs[0]].type) != node.type:
            return False
    except Mismatch:
        return False
    editor.replace(node.name, node.op, *inner.inputs)
    return True


RULES = (
    *(Rule(f"{kind.opname}(x) : type of x => x", kind, drop_identity) for kind in (Reshape, Cast, Expand, Slice, Cat)),
    Rule("transpose(transpose(x)) => x, transpose(x, a, a) => x", Transpose, drop_transpose),
    Rule("x * 1 => x, x / 1 => x, x ^ 1 => x", Scalar, drop_scalar),
    Rule("(x * a) * b => x * (a b), (x + a) + b => x + (a + b)", Scalar, fold_scalars),
    Rule("reshape(reshape(x)) => reshape(x)", Reshape, fold_reshapes),
)
