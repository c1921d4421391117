"""fuse-attention: dequantise, matmul, mask, softmax and matmul over the cache become one paged tree attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node
from mlsdc.compiler.ops import Op
from mlsdc.compiler.ops_core import Reshape, Softmax
from mlsdc.compiler.ops_kv import Dequantise, Mask, MatMulPV, MatMulQK, PagedAttention, ReadKv, TreeMask
from mlsdc.compiler.ops_quant import Quantise
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import Rule, apply_rules
from mlsdc.compiler.types import GROUP, TensorType


@dataclass(frozen=True)
class FuseAttention(GraphPass):
    """One kernel per layer that reads pages block by block, and never writes scores or f32 keys to memory.

    Before::

        %keys = read_kv(%kv, %tree, layer=0, which="keys")        %keys_f32 = dequantise(%keys)
        %values = read_kv(%kv, %tree, layer=0, which="values")    %values_f32 = dequantise(%values)
        %scores = matmul_qk(%q, %keys_f32, scale=0.125)
        %masked = mask(%scores, %tree_mask)
        %probs = softmax(%masked)
        %attend = matmul_pv(%probs, %values_f32)
        %merged = reshape(%attend, shape=[-1, 576])
        %merged.a8 = quantise(%merged)

    After::

        %attend = paged_attention(%q, %kv, %tree, layer=0, scale=0.125, quantise=true)

    Declines: keys and values of different layers, caches or trees; a mask of another tree, or of other rows; a value in between that
    somebody else reads. The last two ops stay outside where they do not match, and where head_dim is no multiple of 32 (a group of the
    quantised row would span two heads).
    """

    name: ClassVar[str] = "fuse-attention"

    def rewrite(self, graph: Graph) -> Graph:
        return apply_rules(graph, RULES)[0]


def fuse_chain(editor: Editor, node: Node) -> bool:
    """Replace the matmul_pv that ends a chain."""
    probs = inner(editor, node, 0, Softmax)
    masked = probs and inner(editor, probs, 0, Mask)
    scores = masked and inner(editor, masked, 0, MatMulQK)
    keys = scores and stored(editor, scores, "keys")
    values = stored(editor, node, "values")
    if not (masked and scores and keys and values):
        return False
    mask = editor.producer(masked, 1, TreeMask)
    if mask is None or keys.inputs != values.inputs or mask.inputs[0] != keys.inputs[1]:
        return False
    match scores.op, keys.op, values.op, mask.op:
        case MatMulQK() as qk, ReadKv() as read, ReadKv() as other, TreeMask() as seen:
            if replace(other, which="keys") == read and (seen.rows, seen.ctx) == (read.rows, read.ctx):
                fused = PagedAttention(read.layer, qk.scale, seen.window, qk.softcap, sinks=seen.sinks, coarse=read.coarse)
                editor.replace(node.name, fused, scores.inputs[0], *keys.inputs)
                return True
    return False


def inner(editor: Editor, node: Node, index: int, kind: type[Op]) -> Node | None:
    """The producer of an input that nobody else reads."""
    made = editor.producer(node, index, kind)
    return made if made is not None and editor.only_user(made.name) is not None else None


def stored(editor: Editor, matmul: Node, which: str) -> Node | None:
    """The read_kv behind a matmul's second input."""
    plain = inner(editor, matmul, 1, Dequantise)
    read = plain and inner(editor, plain, 0, ReadKv)
    return read if read and isinstance(read.op, ReadKv) and read.op.which == which else None


def take_quantise(editor: Editor, quantise: Node) -> bool:
    """Let the attention behind a quantise write quantised rows."""
    merged = inner(editor, quantise, 0, Reshape)
    attention = merged and inner(editor, merged, 0, PagedAttention)
    if quantise.op != Quantise() or not (merged and attention):
        return False
    match attention.op, attention.type, merged.type:
        case PagedAttention() as op, TensorType(_, (rows, int(heads), int(dim))), TensorType(_, flat):
            if dim % GROUP == 0 and flat == (rows, heads * dim):
                editor.replace(attention.name, replace(op, quantise=True), *attention.inputs)
                editor.redirect(quantise.name, attention.name)
                return True
    return False


RULES = (
    Rule("matmul_pv(softmax(mask(matmul_qk(q, keys), tree_mask)), values) -> paged_attention(q, kv, tree)", MatMulPV, fuse_chain),
    Rule("quantise(reshape(paged_attention(q, kv, tree))) -> paged_attention(q, kv, tree, quantise)", Quantise, take_quantise),
)
