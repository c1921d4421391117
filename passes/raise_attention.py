"""Recognise causal attention, with or without grouped keys, from torch's fused op or from matmuls and softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node
from mlsdc.compiler.ops_capture import CausalMask, Sdpa
from mlsdc.compiler.ops_core import Expand, MatMul, Reshape, Softmax, Transpose
from mlsdc.compiler.ops_nn import Attention
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import Rule, apply_rules
from mlsdc.passes.raise_match import binary, first, from_rows, operands, scalar, seq_axis, shape_of, to_rows, unary


@dataclass(frozen=True)
class RaiseAttention(GraphPass):
    """
    before: %k5 = reshape(%k, shape=[1, 3, 1, -1, 64])
            %ke = expand(%k5, shape=[-1, -1, 3, -1, -1])
            %kr = reshape(%ke, shape=[1, 9, -1, 64])                      the same for %v
            %mask = causal_mask(%tokens)
            %y = sdpa(%q, %kr, %vr, %mask, scale=0.125)
    after:  %y = attention(%q, %k, %v, scale=0.125)

    between reshapes to rows [seq, heads, d] and back. Also softmax(q @ k^T * scale + mask) @ v, with an optional softcap.
    Declines where the mask is missing or not causal, and where heads are not repeated kv heads in order.
    """

    name: ClassVar[str] = "raise-attention"

    def rewrite(self, graph: Graph) -> Graph:
        return apply_rules(graph, RULES)[0]


def fused(editor: Editor, node: Node) -> bool:
    if not isinstance(node.op, Sdpa):
        return False
    q, k, v = (editor[name] for name in node.inputs[:3])
    window = 0
    if len(node.inputs) == 4:
        mask = editor[node.inputs[3]].op
        if not isinstance(mask, CausalMask):
            return False
        window = mask.window
    elif not node.op.causal:
        return False
    return _raise(editor, node, q, k, v, Attention(node.op.scale, window))


def spelled_out(editor: Editor, node: Node) -> bool:
    """softmax(softcap(q @ k^T * scale) + mask) @ v."""
    if not isinstance(node.op, MatMul):
        return False
    probabilities, v = (editor[name] for name in node.inputs)
    if not isinstance(probabilities.op, Softmax):
        return False
    masked = first(editor, probabilities)
    if not binary(masked, "add"):
        return False
    for scores, mask in operands(editor, masked):
        if not isinstance(mask.op, CausalMask) or not mask.op.additive:
            continue
        softcap, scores = _softcap(editor, scores)
        scale, scores = _scale(editor, scores)
        if not isinstance(scores.op, MatMul):
            return False
        q, kt = (editor[name] for name in scores.inputs)
        q_scale, q = _scale(editor, q)
        kt_scale, kt = _scale(editor, kt)
        if not isinstance(kt.op, Transpose) or {kt.op.a % 4, kt.op.b % 4} != {2, 3}:
            return False
        k_scale, k = _scale(editor, first(editor, kt))
        return _raise(editor, node, q, k, v, Attention(scale * q_scale * kt_scale * k_scale, mask.op.window, softcap))
    return False


def _raise(editor: Editor, node: Node, q: Node, k: Node, v: Node, op: Attention) -> bool:
    if seq_axis(q) != 2:
        return False
    k, v = _ungrouped(editor, k), _ungrouped(editor, v)
    heads, kv_heads = shape_of(q)[1], shape_of(k)[1]
    if len(shape_of(q)) != 4 or shape_of(q)[0] != 1 or shape_of(v) != shape_of(k) or seq_axis(k) != 2:
        return False
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads % kv_heads:
        return False
    rows = [made for value, part in ((q, "q"), (k, "k"), (v, "v")) if (made := to_rows(editor, value, f"{node.name}.{part}"))]
    from_rows(editor, node.name, editor.add(f"{node.name}.attention", op, *rows, origin=node.origin), node)
    return True


def _ungrouped(editor: Editor, node: Node) -> Node:
    """The kv heads before each was repeated for its group: reshape(expand(reshape(x))) -> x; the node itself if it is not that."""
    if not isinstance(node.op, Reshape):
        return node
    wide = first(editor, node)
    if not isinstance(wide.op, Expand):
        return node
    apart = first(editor, wide)
    if not isinstance(apart.op, Reshape):
        return node
    x = first(editor, apart)
    batch, heads, *rest = shape_of(x)
    group = shape_of(wide)[2]
    if shape_of(apart) != (batch, heads, 1, *rest) or shape_of(wide) != (batch, heads, group, *rest):
        return node
    return x


def _scale(editor: Editor, node: Node) -> tuple[float, Node]:
    factor = scalar(node, "mul")
    if factor is not None:
        return factor, first(editor, node)
    divisor = scalar(node, "div")
    return (1.0 / divisor, first(editor, node)) if divisor else (1.0, node)


def _softcap(editor: Editor, node: Node) -> tuple[float, Node]:
    """cap * tanh(s / cap) -> (cap, s)."""
    cap = scalar(node, "mul")
    if cap is None:
        return 0.0, node
    bounded = first(editor, node)
    if not unary(bounded, "tanh"):
        return 0.0, node
    inner = first(editor, bounded)
    return (cap, first(editor, inner)) if scalar(inner, "div") == cap else (0.0, node)


RULES = (
    Rule("sdpa(q, repeat(k), repeat(v), causal_mask) => attention(q, k, v)", Sdpa, fused),
    Rule("softmax(q @ k^T * scale + causal_mask) @ v => attention(q, k, v)", MatMul, spelled_out),
)
