"""From one sequence to rows: the batch axis goes, the sequence axis comes first, and logits are made where they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.errors import CaptureError
from mlsdc.compiler.graph import Builder, Graph, Input, Node, Weight
from mlsdc.compiler.ops import Op
from mlsdc.compiler.ops_capture import CausalMask, Positions, Sdpa
from mlsdc.compiler.ops_core import (
    ArgMax,
    Binary,
    Cast,
    Cat,
    Expand,
    GatherRows,
    MatMul,
    Reduce,
    Reshape,
    Scalar,
    Slice,
    Softmax,
    Transpose,
    Unary,
)
from mlsdc.compiler.ops_moe import ExpertLinear, Take, TopIndex
from mlsdc.compiler.ops_nn import Attention, Embed, Linear, RmsNorm, Rope, RopeTable
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import note
from mlsdc.compiler.types import Dim, DType, Size, TensorType
from mlsdc.passes import raise_attention, raise_norm, raise_rope


@dataclass(frozen=True)
class Rowify(GraphPass):
    """
    before: %tokens = input() : i32[1, seq]
            %embed = embed(%tokens, %w) : f32[1, seq, 576]
            %q = reshape(%x, shape=[1, -1, 9, 64])
            %t = transpose(%q, a=1, b=2) : f32[1, 9, seq, 64]
            %lm_head = linear(%norm, %w) : f32[1, seq, 49152]
            output logits = %lm_head
    after:  %tokens = input() : i32[rows]
            %positions = input() : i32[rows]
            %out_rows = input() : i32[out]
            %embed = embed(%tokens, %w) : f32[rows, 576]
            %q = reshape(%x, shape=[-1, 9, 64]) : f32[rows, 9, 64]
            %out_hidden = gather_rows(%norm, %out_rows) : f32[out, 576]
            %lm_head = linear(%out_hidden, %w) : f32[out, 49152]
            %choices = argmax(%lm_head)
            output logits = %lm_head, choices = %choices

    Fields: the largest number of rows and of rows with logits, and how many ids may be chosen (0: all).
    Declines for a graph whose `tokens` are not [1, seq]. Raises CaptureError listing the nodes that mix rows and were not raised.
    """

    max_rows: int = 512
    max_out: int = 512
    vocab_size: int = 0
    name: ClassVar[str] = "rowify"

    def rewrite(self, graph: Graph) -> Graph:
        tokens = graph.by_name.get("tokens")
        if tokens is None or not isinstance(tokens.type, TensorType) or tokens.type.rank != 2 or "logits" not in dict(graph.outputs):
            return graph
        rows = _Rows(graph, self).build()
        note("tokens[1, seq] => rows", graph.name, "tokens")
        return rows


class MixesRows(Exception):
    """A node that is not a function of each row by itself."""


class _Rows:
    """One walk: `env` maps each old value to the row value that stands for it."""

    def __init__(self, graph: Graph, options: Rowify) -> None:
        self.graph, self.options = graph, options
        self.builder = Builder(graph.name)
        self.env: dict[str, str] = {}
        self.rows = Dim("rows", 1, options.max_rows)

    def build(self) -> Graph:
        live = self._live()
        head = self._head()
        tokens = self.graph["tokens"].type
        assert isinstance(tokens, TensorType)
        self.env["tokens"] = self.builder.input("tokens", TensorType(tokens.dtype, (self.rows,)))
        positions = self.builder.input("positions", TensorType(DType.I32, (self.rows,)))
        out_rows = self.builder.input("out_rows", TensorType(DType.I32, (Dim("out", 1, self.options.max_out),)))
        mixed: list[Node] = []
        bad: set[str] = set()
        for node in self.graph:
            if node.name not in live or node.name in self.env:
                continue
            if bad.intersection(node.inputs):
                bad.add(node.name)
                if type(node.op) not in _RULES:
                    mixed.append(node)
                continue
            if isinstance(node.op, Positions):
                self.env[node.name] = positions
                continue
            if node.name == head:
                self._gather(node, out_rows)
            try:
                self.env[node.name] = self._convert(node)
            except MixesRows:
                mixed.append(node)
                bad.add(node.name)
        if mixed:
            raise CaptureError(_unraised(self.graph.name, mixed))
        logits = self.env[dict(self.graph.outputs)["logits"]]
        if head is None:
            logits = self.builder.add("out_logits", GatherRows(), logits, out_rows)
        vocab = self.builder.nodes[logits].type
        assert isinstance(vocab, TensorType)
        limit = self.options.vocab_size if self.options.vocab_size != vocab.shape[-1] else 0
        return self.builder.build(logits=logits, choices=self.builder.add("choices", ArgMax(limit), logits))

    def _live(self) -> set[str]:
        live: set[str] = set()
        pending = [dict(self.graph.outputs)["logits"]]
        while pending:
            name = pending.pop()
            if name not in live:
                live.add(name)
                pending.extend(self.graph[name].inputs)
        return live

    def _head(self) -> str | None:
        """The linear that makes the logits, before any elementwise op on them; rows are gathered in front of it."""
        node = self.graph[dict(self.graph.outputs)["logits"]]
        while isinstance(node.op, Unary | Scalar | Cast):
            node = self.graph[node.inputs[0]]
        return node.name if isinstance(node.op, Linear) else None

    def _gather(self, head: Node, out_rows: str) -> None:
        hidden = head.inputs[0]
        self.env[hidden] = self.builder.add("out_hidden", GatherRows(), self.env[hidden], out_rows)

    def _convert(self, node: Node) -> str:
        if isinstance(node.op, Weight):
            assert isinstance(node.type, TensorType)
            return self.builder.weight(node.name, node.type, *node.op.sources)
        if isinstance(node.op, Input):
            raise MixesRows
        inputs = tuple(self.env[name] for name in node.inputs)
        if not any(_axis(self.graph[name]) is not None for name in node.inputs):
            return self._add(node, node.op, inputs)
        rule = _RULES.get(type(node.op))
        if rule is None:
            raise MixesRows
        op = rule(self, node)
        return inputs[0] if op is None else self._add(node, op, inputs)

    def _add(self, node: Node, op: Op, inputs: tuple[str, ...]) -> str:
        return self.builder.add(node.name, op, *inputs, origin=node.origin)

    # one rule an op: the op on rows, or None if the row value is the input's

    def by_row(self, node: Node) -> Op | None:
        """Ops on the last axis, or elementwise."""
        if _seq(node) == len(_shape(node)) - 1 and not isinstance(node.op, Unary | Scalar | Cast | Embed):
            raise MixesRows
        return node.op

    def already_rows(self, node: Node) -> Op | None:
        return node.op

    def binary(self, node: Node) -> Op | None:
        """Operands with a sequence must have it at the same place from the right; one without must lie to its right."""
        rank, axis = len(_shape(node)), _seq(node)
        for name in node.inputs:
            value = self.graph[name]
            shape = _shape(value)
            if _axis(value) is None:
                if any(size != 1 for size in shape[: max(len(shape) - (rank - 1 - axis), 0)]):
                    raise MixesRows
            elif len(shape) != rank or _seq(value) != axis:
                raise MixesRows
        return node.op

    def reshape(self, node: Node) -> Op | None:
        before, after = self.graph[node.inputs[0]], node
        leading = all(size == 1 for value in (before, after) for size in _shape(value)[: _seq(value)])
        if not leading and [s for s in _shape(before) if s != 1] != [s for s in _shape(after) if s != 1]:
            raise MixesRows
        wanted = _row_shape(after)
        return None if wanted == _row_shape(before) else Reshape((-1, *wanted))

    def transpose(self, node: Node) -> Op | None:
        assert isinstance(node.op, Transpose)
        x = self.graph[node.inputs[0]]
        rank = len(_shape(x))
        order = list(range(rank))
        a, b = node.op.a % rank, node.op.b % rank
        order[a], order[b] = b, a
        kept = _row_axes(x)
        moved = [axis for axis in order if axis in kept]
        if (order[0] != 0 and 0 not in kept and _seq(x) != 0) or len(_row_axes(node)) != len(kept):
            raise MixesRows
        swapped = [i + 1 for i, (old, new) in enumerate(zip(kept, moved, strict=True)) if old != new]
        if len(swapped) not in (0, 2):
            raise MixesRows
        return Transpose(*swapped) if swapped else None

    def along(self, node: Node) -> Op | None:
        """slice, cat and reduce over an axis that is not the sequence."""
        op = node.op
        assert isinstance(op, Slice | Cat | Reduce)
        x = self.graph[node.inputs[0]]
        axis = op.axis % len(_shape(x))
        if axis not in _row_axes(x) or any(_axis(self.graph[name]) is None for name in node.inputs):
            raise MixesRows
        at = _row_axes(x).index(axis) + 1
        if isinstance(op, Slice):
            return Slice(at, op.start, op.end)
        return Cat(at) if isinstance(op, Cat) else Reduce(op.fn, at)

    def expand(self, node: Node) -> Op | None:
        x = self.graph[node.inputs[0]]
        if len(_shape(x)) != len(_shape(node)) or len(_row_axes(x)) != len(_row_axes(node)):
            raise MixesRows
        return None if _row_shape(x) == _row_shape(node) else Expand((-1, *_row_shape(node)))


_RULES: dict[type[Op], Callable[[_Rows, Node], Op | None]] = {
    Embed: _Rows.by_row,
    Linear: _Rows.by_row,
    RmsNorm: _Rows.by_row,
    Unary: _Rows.by_row,
    Scalar: _Rows.by_row,
    Cast: _Rows.by_row,
    Softmax: _Rows.by_row,
    TopIndex: _Rows.by_row,
    Take: _Rows.already_rows,
    ExpertLinear: _Rows.already_rows,
    Rope: _Rows.already_rows,
    RopeTable: _Rows.already_rows,
    Attention: _Rows.already_rows,
    Binary: _Rows.binary,
    Reshape: _Rows.reshape,
    Transpose: _Rows.transpose,
    Slice: _Rows.along,
    Cat: _Rows.along,
    Reduce: _Rows.along,
    Expand: _Rows.expand,
}


def _shape(node: Node) -> tuple[Size, ...]:
    if not isinstance(node.type, TensorType):
        raise MixesRows
    return node.type.shape


def _axis(node: Node) -> int | None:
    """The sequence axis, or None for a value without one."""
    axes = [i for i, size in enumerate(_shape(node)) if not isinstance(size, int)]
    if len(axes) > 1:
        raise MixesRows
    return axes[0] if axes else None


def _seq(node: Node) -> int:
    axis = _axis(node)
    if axis is None:
        raise MixesRows
    return axis


def _row_axes(node: Node) -> list[int]:
    """Axes that stay beside the row: all but the sequence and a batch of one in front."""
    shape, axis = _shape(node), _seq(node)
    return [i for i in range(len(shape)) if i != axis and not (i == 0 and shape[0] == 1)]


def _row_shape(node: Node) -> tuple[int, ...]:
    """Static sizes beside the row."""
    shape = _shape(node)
    return tuple(size for i in _row_axes(node) if isinstance(size := shape[i], int))


def _unraised(graph: str, nodes: list[Node]) -> str:
    """One line: which nodes mix rows, and the equation that would have to hold for the first of them.

    Nodes that always mix rows come first: a reshape that does so is there for one of them.
    """
    nodes = sorted(nodes, key=lambda node: type(node.op) in _RULES)
    shown = ", ".join(f"%{node.name} ({node.op.opname}{', from ' + node.origin if node.origin else ''})" for node in nodes[:4])
    more = f" and {len(nodes) - 4} more" if len(nodes) > 4 else ""
    nearest = next((rule.equation for node in nodes for rule in _NEAREST.get(type(node.op), ())), None)
    hint = f"; the nearest rule is {nearest}" if nearest else ""
    return f"graph '{graph}' cannot become a row program: {shown}{more} mix rows and no rule raised them{hint}"


_NEAREST = {
    Sdpa: raise_attention.RULES[:1],
    MatMul: raise_attention.RULES[1:],
    Softmax: raise_attention.RULES[1:],
    CausalMask: raise_attention.RULES,
    Binary: (*raise_rope.RULES, *raise_norm.RULES),
}
