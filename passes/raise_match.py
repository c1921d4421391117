"""What the raising rules look at around a node, and the way from a sequence's values to rows and back."""

from __future__ import annotations

from collections.abc import Iterator

from mlsdc.compiler.graph import Editor, Node
from mlsdc.compiler.ops_core import Binary, Cast, Expand, Reshape, Scalar, Transpose, Unary
from mlsdc.compiler.types import Dim, Size, TensorType


def operands(editor: Editor, node: Node) -> Iterator[tuple[Node, Node]]:
    """Both orders of a commutative node's inputs."""
    a, b = (editor[name] for name in node.inputs)
    yield a, b
    yield b, a


def binary(node: Node, fn: str) -> bool:
    return isinstance(node.op, Binary) and node.op.fn == fn


def unary(node: Node, fn: str) -> bool:
    return isinstance(node.op, Unary) and node.op.fn == fn


def scalar(node: Node, fn: str) -> float | None:
    """The constant of a `scalar` node of that function."""
    return node.op.value if isinstance(node.op, Scalar) and node.op.fn == fn else None


def first(editor: Editor, node: Node) -> Node:
    return editor[node.inputs[0]]


def unshaped(editor: Editor, node: Node, *, casts: bool = False) -> Node:
    """The value behind ops that only move or repeat elements (and casts, if asked)."""
    while isinstance(node.op, Reshape | Transpose | Expand) or (casts and isinstance(node.op, Cast)):
        node = first(editor, node)
    return node


def shape_of(node: Node) -> tuple[Size, ...]:
    return node.type.shape if isinstance(node.type, TensorType) else ()


def seq_axis(node: Node) -> int | None:
    """The one symbolic axis, or None if there is none or more than one."""
    axes = [i for i, size in enumerate(shape_of(node)) if isinstance(size, Dim)]
    return axes[0] if len(axes) == 1 else None


def to_rows(editor: Editor, value: Node, base: str) -> str | None:
    """`value` [1, heads, seq, d] or [1, seq, heads, d] as rows [seq, heads, d]; new nodes are named after `base`. None for other shapes."""
    shape, axis = shape_of(value), seq_axis(value)
    if len(shape) != 4 or shape[0] != 1 or axis not in (1, 2):
        return None
    heads, dim = shape[3 - axis], shape[3]
    assert isinstance(heads, int)
    assert isinstance(dim, int)
    turned = value.name if axis == 1 else editor.add(f"{base}.turned", Transpose(1, 2), value.name)
    return editor.add(f"{base}.rows", Reshape((-1, heads, dim)), turned)


def from_rows(editor: Editor, name: str, rows: str, like: Node) -> str:
    """Make value `name` the rows [seq, heads, d] back in the shape of `like`."""
    axis = seq_axis(like)
    shape = shape_of(editor[rows])
    heads, dim = shape[1], shape[2]
    assert isinstance(heads, int)
    assert isinstance(dim, int)
    whole = Reshape((1, -1, heads, dim))
    if axis == 1:
        return editor.replace(name, whole, rows)
    return editor.replace(name, Transpose(1, 2), editor.add(f"{name}.back", whole, rows))
