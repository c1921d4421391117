"""quantise-weights: linears over packed weights and quantised rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node, Weight
from mlsdc.compiler.ops_core import ArgMax, Scalar, Unary
from mlsdc.compiler.ops_moe import ExpertLinear
from mlsdc.compiler.ops_nn import Embed, Linear
from mlsdc.compiler.ops_quant import Calibrated, LinearF8, LinearQ, Quantise
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import Rule, apply_rules
from mlsdc.compiler.types import GROUP, DType, TensorType
from mlsdc.passes.experts import expert_rows, packable_experts, packed, routes
from mlsdc.passes.names import free

WEIGHTS = ("int8", "int4", "int4-a16", "fp8", "fp8-a8", "bf16", "none")


@dataclass(frozen=True)
class QuantiseWeights(GraphPass):
    """Pack the weights of linears and embeddings; quantise each linear's input once, whatever the number of its users.

    Before::

        %w.q = weight() : f32[576, 576]    %q = linear(%h, %w.q)    %k = linear(%h, %w.k)

    After::

        %w.q = weight() : q8[576, 576]    %h.a8 = quantise(%h)    %q = linear_q(%h.a8, %w.q)    %k = linear_q(%h.a8, %w.k)

    `weights` int8 packs as q8. int4 packs as q4, but for embeddings and the head (whose errors the softmax does not forgive): q8.
    int4-a16 packs weights as int4 does and leaves the ops, and so the rows, as they are.
    bf16 rounds weights and leaves the ops as they are; fp8 does so too, but packs linears' weights as f8 (embeddings and the head: bf16).
    fp8-a8 packs as fp8 does, and linears of f8 become linear_f8, whose rows are e4m3, too; a bias moves into it.
    none changes nothing. Values that
    `calibrate-activations` found to have a few groups of large numbers are quantised with a second plane there (a16). A bias stays f32
    and moves into linear_q.
    An embedding keeps its op, its table is packed. Experts are packed likewise; the linear that chooses them stays f32.

    Declines, weight by weight: columns that are no multiple of 32 (bf16 and fp8: of 2); a weight that anything but linears (of rank-2
    inputs) and embeddings reads, or that is an output.
    """

    name: ClassVar[str] = "quantise-weights"
    tolerance: ClassVar[float] = 0.15  # seen on SmolLM2's shape with random weights: 0.05 (int8)
    weights: str = "int8"

    def rewrite(self, graph: Graph) -> Graph:
        if self.weights == "none":
            return graph
        if self.weights == "bf16":
            return apply_rules(graph, (Rule("linear(x, w) -> linear(x, w as bf16)", Weight, self._round),))[0]
        if self.weights == "fp8":
            return apply_rules(graph, (Rule("linear(x, w) -> linear(x, w as f8)", Weight, self._scale_rows),))[0]
        if self.weights == "fp8-a8":
            return apply_rules(graph, (Rule("linear(x, w) -> linear_f8(x, w as f8)", Weight, self._scale_both),))[0]
        if self.weights == "int4-a16":
            return apply_rules(graph, (Rule("linear(x, w) -> linear(x, w as q4)", Weight, self._pack_weight),))[0]
        rules = (
            Rule(f"linear(x, w) -> linear_q(quantise(x), w as {self.weights})", Weight, self._pack),
            Rule(f"expert_linear(x, w, i) -> expert_linear_q(quantise(x), w as {self.weights}, i)", ExpertLinear, self._pack_experts),
        )
        return apply_rules(graph, rules)[0]

    def _round(self, editor: Editor, weight: Node) -> bool:
        return packable(editor, weight, 2) and retyped(editor, weight, DType.BF16)

    def _scale_rows(self, editor: Editor, weight: Node) -> bool:
        return packable(editor, weight, 2) and retyped(editor, weight, DType.BF16 if is_precise(editor, weight) else DType.F8)

    def _scale_both(self, editor: Editor, weight: Node) -> bool:
        if not self._scale_rows(editor, weight):
            return False
        for linear in editor.users(weight.name) if not is_precise(editor, weight) else ():
            editor.replace(linear.name, LinearF8(bias=len(linear.inputs) == 3), *linear.inputs)
        return True

    def _pack_weight(self, editor: Editor, weight: Node) -> bool:
        return packable(editor, weight) and retyped(editor, weight, DType.Q8 if is_precise(editor, weight) else DType.Q4)

    def _pack(self, editor: Editor, weight: Node) -> bool:
        if not packable(editor, weight):
            return False
        assert isinstance(weight.type, TensorType)
        linears = [user for user in editor.users(weight.name) if isinstance(user.op, Linear)]
        dtype = DType.Q4 if self.weights == "int4" and not is_precise(editor, weight) else DType.Q8
        if not linears and weight.type.dtype is dtype:
            return False
        editor.retype(weight.name, weight.type.with_dtype(dtype))
        for linear in linears:
            x, *rest = linear.inputs
            seen = editor[x]
            fine: tuple[int, ...] = ()
            if isinstance(seen.op, Calibrated):
                x, fine = seen.inputs[0], seen.op.fine
            editor.replace(linear.name, LinearQ(bias=len(rest) == 2), quantised(editor, x, fine), *rest)
        return True

    def _pack_experts(self, editor: Editor, linear: Node) -> bool:
        if not packable_experts(editor, linear):
            return False
        weight = editor[linear.inputs[1]]
        assert isinstance(weight.type, TensorType)
        editor.retype(weight.name, weight.type.with_dtype(DType.Q4 if self.weights == "int4" else DType.Q8))
        x, slots = expert_rows(editor, linear)
        packed(editor, linear, quantised(editor, x, ()), slots)
        return True


def packable(editor: Editor, weight: Node, multiple: int = GROUP) -> bool:
    type_, users = weight.type, editor.users(weight.name)
    if not isinstance(type_, TensorType) or type_.rank != 2 or not users or editor.is_output(weight.name):
        return False
    columns = type_.shape[1]
    return isinstance(columns, int) and columns % multiple == 0 and all(reads_as_weight(editor, user, weight.name) for user in users)


def reads_as_weight(editor: Editor, user: Node, weight: str) -> bool:
    if not isinstance(user.op, Linear | Embed) or user.inputs[1] != weight or user.inputs.count(weight) != 1:
        return False
    if isinstance(user.op, Linear) and routes(editor, user):
        return False
    x = editor[user.inputs[0]].type
    return isinstance(user.op, Embed) or (isinstance(x, TensorType) and x.rank == 2)


def retyped(editor: Editor, weight: Node, dtype: DType) -> bool:
    """Gives the weight another dtype; False if it has it."""
    assert isinstance(weight.type, TensorType)
    if weight.type.dtype is dtype:
        return False
    editor.retype(weight.name, weight.type.with_dtype(dtype))
    return True


def is_precise(editor: Editor, weight: Node) -> bool:
    """An embedding's or the head's."""
    return any(not isinstance(user.op, Linear) or is_head(editor, user) for user in editor.users(weight.name))


def is_head(editor: Editor, linear: Node) -> bool:
    """Logits: an output of the graph, or what a choice is made from, a soft-cap (Gemma 2) in between or not."""
    users = editor.users(linear.name)
    if editor.is_output(linear.name) or any(isinstance(user.op, ArgMax) for user in users):
        return True
    return len(users) == 1 and isinstance(users[0].op, Unary | Scalar) and is_head(editor, users[0])


def quantised(editor: Editor, x: str, fine: tuple[int, ...]) -> str:
    """The one quantised form of a value, a8 or a16."""
    for user in editor.users(x):
        if user.op == Quantise(fine):
            return user.name
    return editor.add(free(editor, f"{x}.{'a16' if fine else 'a8'}"), Quantise(fine), x, origin=editor[x].origin)
