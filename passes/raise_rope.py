"""Recognise rotary position embedding, and share one table of angles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node, Weight
from mlsdc.compiler.ops_capture import Positions
from mlsdc.compiler.ops_core import Binary, Cat, MatMul, Slice
from mlsdc.compiler.ops_nn import Rope, RopeTable
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import Rule, apply_rules
from mlsdc.passes.raise_match import binary, first, from_rows, operands, scalar, seq_axis, shape_of, to_rows, unary, unshaped


@dataclass(frozen=True)
class RaiseRope(GraphPass):
    """
    before: %f = binary(%positions, %inv_freq, fn="mul")
            %e = cat(%f, %f)
            %cos = unary(%e, fn="cos")
            %sin = unary(%e, fn="sin")
            %lo = slice(%x, axis=3, start=0, end=32)
            %hi = slice(%x, axis=3, start=32, end=64)
            %neg = unary(%hi, fn="neg")
            %turned = cat(%neg, %lo)
            %a = binary(%x, %cos, fn="mul")
            %b = binary(%turned, %sin, fn="mul")
            %y = binary(%a, %b, fn="add")
    after:  %rope_table = rope_table(%positions, %inv_freq)
            %y = rope(%x, %rope_table)

    between a reshape to rows [seq, heads, d] and one back. Also without rotate_half: cat(lo * cos - hi * sin, hi * cos + lo * sin).
    Where only the first r of d channels turn, cat(rope(%x[:r]), %x[r:]) is one rope of %x.
    Declines where the angles are not positions times a weight, or %x is not [1, heads, seq, d] or [1, seq, heads, d].
    """

    name: ClassVar[str] = "raise-rope"

    def rewrite(self, graph: Graph) -> Graph:
        return apply_rules(graph, RULES)[0]


@dataclass(frozen=True)
class Angles:
    """cos or sin of positions * inv_freq, times `scaling`; `doubled` if the d/2 angles stand twice side by side."""

    positions: str
    inv_freq: str
    scaling: float
    doubled: bool


def rotated(editor: Editor, node: Node) -> bool:
    """x * cos + rotate_half(x) * sin."""
    if not binary(node, "add"):
        return False
    for plain, turned in operands(editor, node):
        if not binary(plain, "mul") or not binary(turned, "mul"):
            continue
        for half, s in operands(editor, turned):
            source = _rotate_half(editor, half)
            if source is None:
                continue
            for x, c in operands(editor, plain):
                cos, sin = angles(editor, c, "cos"), angles(editor, s, "sin")
                if x.name == source.name and cos is not None and cos == sin and cos.doubled:
                    return _raise(editor, node, x, cos)
    return False


def rotated_halves(editor: Editor, node: Node) -> bool:
    """cat(lo * cos - hi * sin, hi * cos + lo * sin)."""
    if not isinstance(node.op, Cat) or len(node.inputs) != 2 or node.op.axis not in (-1, len(shape_of(node)) - 1):
        return False
    low, high = (editor[name] for name in node.inputs)
    if not binary(low, "sub") or not binary(high, "add"):
        return False
    lo_cos, hi_sin = (_product(editor, editor[name], fn) for name, fn in zip(low.inputs, ("cos", "sin"), strict=True))
    if lo_cos is None or hi_sin is None:
        return False
    (lo, cos), (hi, sin) = lo_cos, hi_sin
    for a, b in operands(editor, high):
        if _product(editor, a, "cos") == (hi, cos) and _product(editor, b, "sin") == (lo, sin) and cos == sin and not cos.doubled:
            x = _halves(editor, lo, hi)
            return x is not None and _raise(editor, node, x, cos)
    return False


def _raise(editor: Editor, node: Node, x: Node, found: Angles) -> bool:
    if 2 * _size(editor[found.inv_freq], 0) != _size(x, -1):
        return False
    rows = to_rows(editor, x, node.name)
    if rows is None:
        return False
    made = editor.add(f"{node.name}.rope", Rope(), rows, _table(editor, found), origin=node.origin)
    from_rows(editor, node.name, made, node)
    return True


def partly_rotated(editor: Editor, node: Node) -> bool:
    """cat(rope(x[..., :r]), x[..., r:]), the rope between reshapes to rows and back."""
    if not isinstance(node.op, Cat) or len(node.inputs) != 2 or node.op.axis not in (-1, len(shape_of(node)) - 1):
        return False
    turned, rest = (editor[name] for name in node.inputs)
    rope = unshaped(editor, turned)
    if not isinstance(rope.op, Rope) or not isinstance(rest.op, Slice):
        return False
    low = unshaped(editor, first(editor, rope))
    if not isinstance(low.op, Slice) or low.inputs != rest.inputs or seq_axis(turned) != seq_axis(low):
        return False
    x = first(editor, low)
    last, size, r = len(shape_of(x)) - 1, _size(x, -1), _size(low, -1)
    if (low.op.start, low.op.end, rest.op.start, rest.op.end) != (0, r, r, size) or {low.op.axis, rest.op.axis} - {-1, last}:
        return False
    rows = to_rows(editor, x, node.name)
    if rows is None:
        return False
    from_rows(editor, node.name, editor.add(f"{node.name}.rope", Rope(), rows, rope.inputs[1], origin=node.origin), node)
    return True


def _table(editor: Editor, found: Angles) -> str:
    """The graph's one table for these angles."""
    op, inputs = RopeTable(found.scaling), (found.positions, found.inv_freq)
    for user in editor.users(found.inv_freq):
        if user.op == op and user.inputs == inputs:
            return user.name
    name, count = "rope_table", 1
    while name in editor.nodes:
        count += 1
        name = f"rope_table_{count}"
    return editor.add(name, op, *inputs)


def angles(editor: Editor, node: Node, fn: str) -> Angles | None:
    """What `node` is if it is the cos (or sin) of positions times frequencies."""
    node = unshaped(editor, node)
    scaling = scalar(node, "mul")
    if scaling is not None:
        node = unshaped(editor, first(editor, node))
    if not unary(node, fn):
        return None
    argument = unshaped(editor, first(editor, node))
    doubled = isinstance(argument.op, Cat)
    if doubled:
        if len(argument.inputs) != 2 or argument.inputs[0] != argument.inputs[1]:
            return None
        argument = unshaped(editor, first(editor, argument))
    if not binary(argument, "mul") and not isinstance(argument.op, MatMul):
        return None
    for a, b in operands(editor, argument):
        positions, frequencies = unshaped(editor, a, casts=True), unshaped(editor, b)
        if isinstance(positions.op, Positions) and isinstance(frequencies.op, Weight) and len(shape_of(frequencies)) == 1:
            return Angles(positions.name, frequencies.name, 1.0 if scaling is None else scaling, doubled)
    return None


def _product(editor: Editor, node: Node, fn: str) -> tuple[Node, Angles] | None:
    """(x, angles) if the node is x times a cos (or sin)."""
    if not binary(node, "mul"):
        return None
    for x, table in operands(editor, node):
        found = angles(editor, table, fn)
        if found is not None:
            return x, found
    return None


def _rotate_half(editor: Editor, node: Node) -> Node | None:
    """x if the node is cat(-x[..., d/2:], x[..., :d/2])."""
    if not isinstance(node.op, Cat) or len(node.inputs) != 2 or node.op.axis not in (-1, len(shape_of(node)) - 1):
        return None
    negated, lo = (editor[name] for name in node.inputs)
    return _halves(editor, lo, first(editor, negated)) if unary(negated, "neg") else None


def _halves(editor: Editor, lo: Node, hi: Node) -> Node | None:
    """x if lo and hi are the halves of its last axis."""
    if not isinstance(lo.op, Slice) or not isinstance(hi.op, Slice) or lo.inputs != hi.inputs:
        return None
    x = first(editor, lo)
    last, size = len(shape_of(x)) - 1, _size(x, -1)
    halves = (lo.op.start, lo.op.end, hi.op.start, hi.op.end) == (0, size // 2, size // 2, size)
    return x if halves and lo.op.axis in (-1, last) and hi.op.axis in (-1, last) else None


def _size(node: Node, axis: int) -> int:
    size = shape_of(node)[axis]
    return size if isinstance(size, int) else 0


RULES = (
    Rule("x * cos + rotate_half(x) * sin => rope(x, table)", Binary, rotated),
    Rule("cat(lo * cos - hi * sin, hi * cos + lo * sin) => rope(cat(lo, hi), table)", Cat, rotated_halves),
    Rule("cat(rope(x[:r], table), x[r:]) => rope(x, table)", Cat, partly_rotated),
)
