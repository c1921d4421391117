"""What passes ask about mixtures of experts: which linear routes, and which experts can be packed."""

from __future__ import annotations

from mlsdc.compiler.graph import Editor, Node, Weight
from mlsdc.compiler.ops_core import Cast, Reshape, Softmax, Unary
from mlsdc.compiler.ops_moe import ExpertLinear, ExpertLinearQ, TopIndex
from mlsdc.compiler.types import GROUP, TensorType

BLOCK = 16  # rows of a packed block, which must be one expert's


def routes(editor: Editor, linear: Node) -> bool:
    """Whether experts are chosen by the linear's result: it stays f32, a choice that tips changes everything behind it."""
    pending = [linear.name]
    while pending:
        for user in editor.users(pending.pop()):
            if isinstance(user.op, TopIndex):
                return True
            if isinstance(user.op, Softmax | Unary | Cast | Reshape):
                pending.append(user.name)
    return False


def packable_experts(editor: Editor, linear: Node) -> bool:
    """The weight is a weight node of plain numbers that only this expert_linear reads, in whole groups and blocks."""
    weight = editor[linear.inputs[1]]
    if not isinstance(weight.op, Weight) or not isinstance(weight.type, TensorType) or editor.only_user(weight.name) is None:
        return False
    rows, columns = weight.type.shape
    if weight.type.dtype.packed or not isinstance(rows, int) or not isinstance(columns, int) or columns % GROUP:
        return False
    assert isinstance(linear.op, ExpertLinear)
    return rows // linear.op.experts % BLOCK == 0


def expert_rows(editor: Editor, linear: Node) -> tuple[str, int]:
    """The value [rows, slots k] that an expert_linear reads as [rows, slots, k], and slots; a new view where it is not one of that."""
    x = editor[linear.inputs[0]]
    assert isinstance(x.type, TensorType)
    _, slots, k = x.type.shape
    assert isinstance(slots, int)
    assert isinstance(k, int)
    if isinstance(x.op, Reshape):
        flat = editor[x.inputs[0]]
        if isinstance(flat.type, TensorType) and flat.type.rank == 2 and flat.type.shape[1] == slots * k:
            return flat.name, slots
    for user in editor.users(x.name):
        if user.op == Reshape((-1, slots * k)):
            return user.name, slots
    return editor.add(f"{x.name}.rows", Reshape((-1, slots * k)), x.name, origin=x.origin), slots


def packed(editor: Editor, linear: Node, h: str, slots: int) -> None:
    """Make an expert_linear one by int8 dots of the quantised rows `h`."""
    assert isinstance(linear.op, ExpertLinear)
    _, *rest = linear.inputs
    editor.replace(linear.name, ExpertLinearQ(linear.op.experts, slots, len(rest) == 3), h, *rest)
