"""Recognise RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node, Weight
from mlsdc.compiler.ops_core import Binary, Reduce
from mlsdc.compiler.ops_nn import RmsNorm
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import Rule, apply_rules
from mlsdc.passes.raise_match import binary, first, operands, scalar, shape_of, unary


@dataclass(frozen=True)
class RaiseNorm(GraphPass):
    """
    before: %s = scalar(%x, fn="pow", value=2.0)
            %m = reduce(%s, fn="mean")
            %e = scalar(%m, fn="add", value=1e-05)
            %r = unary(%e, fn="rsqrt")
            %n = binary(%x, %r, fn="mul")
            %y = binary(%n, %w, fn="mul")
    after:  %y = rms_norm(%x, %w, eps=1e-05)

    `%w + 1` for `%w` gives offset=1.0. Declines where the mean is not over the last axis, %x differs between the square and the product,
    or %w is not a weight of one axis.
    """

    name: ClassVar[str] = "raise-norm"

    def rewrite(self, graph: Graph) -> Graph:
        return apply_rules(graph, RULES)[0]


def rms_norm(editor: Editor, node: Node) -> bool:
    if not binary(node, "mul"):
        return False
    for scaled, weight in operands(editor, node):
        offset = scalar(weight, "add")
        plain = weight if offset is None else first(editor, weight)
        if not isinstance(plain.op, Weight) or len(shape_of(plain)) != 1:
            continue
        found = _normalised(editor, scaled)
        if found is None:
            continue
        x, eps = found
        editor.replace(node.name, RmsNorm(eps, offset or 0.0), x.name, plain.name)
        return True
    return False


def _normalised(editor: Editor, node: Node) -> tuple[Node, float] | None:
    """(x, eps) if the node is x / sqrt(mean(x^2) + eps)."""
    if binary(node, "div"):
        pairs = [(editor[node.inputs[0]], editor[node.inputs[1]], "sqrt")]
    elif binary(node, "mul"):
        pairs = [(x, root, "rsqrt") for x, root in operands(editor, node)]
    else:
        return None
    for x, root, fn in pairs:
        power = scalar(root, "pow")
        if not unary(root, fn) and power != (0.5 if fn == "sqrt" else -0.5):
            continue
        shifted = first(editor, root)
        eps = scalar(shifted, "add")
        if eps is None:
            continue
        mean = first(editor, shifted)
        if not isinstance(mean.op, Reduce) or mean.op.fn != "mean" or mean.op.axis not in (-1, len(shape_of(mean)) - 1):
            continue
        square = first(editor, mean)
        squares = scalar(square, "pow") == 2.0 or (binary(square, "mul") and square.inputs[0] == square.inputs[1])
        if squares and square.inputs[0] == x.name:
            return x, eps
    return None


RULES = (Rule("x * rsqrt(mean(x^2) + eps) * w => rms_norm(x, w)", Binary, rms_norm),)
