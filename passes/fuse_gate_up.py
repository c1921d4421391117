"""fuse-gate-up: both halves of a gated MLP, its activation and, where there is one, the quantisation of its product in one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node
from mlsdc.compiler.ops_core import Binary, Unary
from mlsdc.compiler.ops_nn import Gated, Linear
from mlsdc.compiler.ops_quant import GatedF8, GatedQuantise, LinearF8, LinearQ, Quantise
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import Rule, apply_rules
from mlsdc.compiler.types import TensorType
from mlsdc.passes.stack_weights import stackable, stacked

ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True)
class FuseGateUp(GraphPass):
    """quantise(act(h @ gate^T) * (h @ up^T)) => gated_quantise(h, gate over up).

    Before::

        %gate = linear_q(%h, %w.gate)    %act = unary(%gate, fn="silu")    %up = linear_q(%h, %w.up)
        %gated = binary(%act, %up, fn="mul")    %gated.a8 = quantise(%gated)

    After (the sources of %w.gate_up are gate's, then up's)::

        %gated = gated_quantise(%h, %w.gate_up, act="silu")

    Over f32 rows, where the weights were made smaller (int4-a16, fp8, bf16), likewise::

        %gate = linear(%h, %w.gate)    %act = unary(%gate, fn="silu")    %up = linear(%h, %w.up)    %gated = binary(%act, %up, fn="mul")

        %gated = gated(%h, %w.gate_up, act="silu")

    Of linear_f8 the result is gated_f8.

    Declines: another activation than silu or gelu_tanh; biases; f32 weights; weights of different dtypes or of more than one reader; a
    value in between that somebody else reads.
    """

    name: ClassVar[str] = "fuse-gate-up"

    def rewrite(self, graph: Graph) -> Graph:
        return apply_rules(graph, RULES)[0]


def fuse(editor: Editor, quantise: Node) -> bool:
    product = editor.producer(quantise, 0, Binary)
    if quantise.op != Quantise() or product is None or product.op != Binary("mul") or editor.only_user(product.name) is None:
        return False
    halves = match_halves(editor, product, LinearQ)
    if halves is None:
        return False
    act, gate, up = halves
    (weight,) = stacked(editor, (gate, up), "gate_up")
    editor.replace(product.name, GatedQuantise(act), gate.inputs[0], weight)
    editor.redirect(quantise.name, product.name)
    return True


def fuse_plain(editor: Editor, product: Node) -> bool:
    if product.op != Binary("mul"):
        return False
    halves = match_halves(editor, product, Linear) or match_halves(editor, product, LinearF8)
    if halves is None:
        return False
    act, gate, up = halves
    x = editor[gate.inputs[0]].type
    if len(gate.inputs) != 2 or not isinstance(x, TensorType) or x.rank != 2:
        return False
    (weight,) = stacked(editor, (gate, up), "gate_up")
    editor.replace(product.name, GatedF8(act) if isinstance(gate.op, LinearF8) else Gated(act), gate.inputs[0], weight)
    return True


def match_halves(editor: Editor, product: Node, kind: type[LinearQ] | type[Linear] | type[LinearF8]) -> tuple[str, Node, Node] | None:
    """(act, gate, up) of act(gate) * up, both linears of a kind, in either order of the operands, else None."""
    for index in (0, 1):
        active, up = editor.producer(product, index, Unary), editor.producer(product, 1 - index, kind)
        gate = editor.producer(active, 0, kind) if active else None
        if not (active and up and gate) or gate.name == up.name:
            continue
        if any(editor.only_user(value.name) is None for value in (active, gate, up)) or not stackable(editor, (gate, up)):
            continue
        match active.op, gate.op:
            case Unary(fn), LinearQ(bias=False) | Linear() | LinearF8(bias=False) if fn in ACTIVATIONS:
                return fn, gate, up
    return None


RULES = (
    Rule("quantise(act(gate(h)) * up(h)) -> gated_quantise(gate_up(h))", Quantise, fuse),
    Rule("act(gate(x)) * up(x) -> gated(gate_up(x)) or gated_f8", Binary, fuse_plain),
)
