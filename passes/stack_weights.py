"""Linears over the same rows as one linear: when their weights can be stacked, and the stacked weight."""

from __future__ import annotations

from collections.abc import Sequence

from mlsdc.compiler.graph import Editor, Node, Weight
from mlsdc.compiler.ops_nn import Linear
from mlsdc.compiler.ops_quant import LinearF8, LinearQ
from mlsdc.compiler.types import DType, TensorType
from mlsdc.passes.names import beside, free


def may_stack(editor: Editor, linear: Node) -> bool:
    """A linear over quantised rows (int8, int4, fp8-a8), or one over f32 rows whose weight was made smaller (int4-a16, fp8, bf16)."""
    if isinstance(linear.op, LinearQ | LinearF8):
        return True
    weight = editor[linear.inputs[1]].type if isinstance(linear.op, Linear) else None
    return isinstance(weight, TensorType) and weight.dtype in (DType.Q8, DType.Q4, DType.F8, DType.BF16)


def stackable(editor: Editor, linears: Sequence[Node]) -> bool:
    """Same input, no residual; weights, and biases (all or none), are weight nodes of one type but for the rows, read by nobody else."""
    first = linears[0]
    if any(not may_stack(editor, linear) or linear.op != first.op or getattr(linear.op, "residual", False) for linear in linears):
        return False
    if any(linear.inputs[0] != first.inputs[0] or len(linear.inputs) != len(first.inputs) for linear in linears):
        return False
    return all(same_but_rows(editor, [linear.inputs[index] for linear in linears]) for index in range(1, len(first.inputs)))


def same_but_rows(editor: Editor, names: Sequence[str]) -> bool:
    kinds = set()
    for name in names:
        node = editor[name]
        if not isinstance(node.op, Weight) or not isinstance(node.type, TensorType) or editor.only_user(name) is None:
            return False
        kinds.add((node.type.dtype, node.type.shape[1:], node.op.shard))
    return len(kinds) == 1


def stacked(editor: Editor, linears: Sequence[Node], leaf: str) -> tuple[str, ...]:
    """New weight nodes (weight, then bias if there is one) named `leaf`, beside the first linear's: rows in the order of `linears`."""
    wanted, names = beside(linears[0].inputs[1], leaf), []
    for index in range(1, len(linears[0].inputs)):
        parts = [editor[linear.inputs[index]] for linear in linears]
        types = [part.type for part in parts if isinstance(part.type, TensorType)]
        sources = [source for part in parts if isinstance(part.op, Weight) for source in part.op.sources]
        shard = parts[0].op.shard if isinstance(parts[0].op, Weight) else ()
        rows = sum(size for type_ in types if isinstance(size := type_.shape[0], int))
        name = free(editor, wanted if index == 1 else f"{wanted}.bias")
        names.append(editor.weight(name, types[0].with_shape(rows, *types[0].shape[1:]), *sources, shard=shard))
    return tuple(names)
