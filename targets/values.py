"""What lowerings of any target ask of a graph's values: their types and static sizes, what counts their rows, where a cache's bytes lie."""

from __future__ import annotations

from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.types import Dim, DType, KvType, TensorType, Type
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.program import IntArg
from mlsdc.runtime.step import Header
from mlsdc.targets.protocol import ValueRef

COUNTS = {"rows": (int(Header.ROWS), "ROWS"), "out": (int(Header.OUT), "OUT")}  # row axis -> the header word that counts it, its name


def input_type(graph: Graph, node: Node, index: int) -> TensorType:
    type_ = graph[node.inputs[index]].type
    assert isinstance(type_, TensorType)
    return type_


def values(node: Node) -> tuple[ValueRef, ...]:
    """The node's inputs, as arguments."""
    return tuple(ValueRef(name) for name in node.inputs)


def whole(type_: TensorType) -> tuple[int, ...]:
    """The static sizes of a shape: all of a weight's, those behind the rows of others."""
    return tuple(int(size) for size in type_.shape if isinstance(size, int))


def is_rows(type_: Type) -> bool:
    """f32[rows, ...] with static axes behind the rows."""
    if not isinstance(type_, TensorType) or type_.dtype is not DType.F32 or type_.rank < 2:
        return False
    rows, *rest = type_.shape
    return isinstance(rows, Dim) and rows.name in COUNTS and all(isinstance(size, int) for size in rest)


def counted_rows(type_: Type) -> tuple[int, str, int]:
    """Of a row-wise value: the header word that counts its rows, that word's name, rows at most."""
    assert isinstance(type_, TensorType)
    dim = type_.shape[0]
    assert isinstance(dim, Dim)
    return (*COUNTS[dim.name], dim.hi)


def fine_of(graph: Graph, value: str) -> tuple[int, ...]:
    """Groups of an a8 or a16 value that have a second plane, as the node that made it says."""
    return getattr(graph[value].op, "fine", ())


def fine_args(fine: tuple[int, ...]) -> tuple[IntArg, ...]:
    return tuple(IntArg(group) for group in fine)


def geometry_of(type_: Type) -> KvGeometry:
    assert isinstance(type_, KvType)
    return KvGeometry(type_.format, type_.page_size, type_.num_layers, type_.num_kv_heads, type_.head_dim)
