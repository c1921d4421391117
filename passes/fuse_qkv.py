"""fuse-qkv: one linear for queries, keys and values; RoPE and the cache write take their columns from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.graph import Editor, Graph, Node
from mlsdc.compiler.ops import Op
from mlsdc.compiler.ops_core import Reshape
from mlsdc.compiler.ops_kv import AppendKv
from mlsdc.compiler.ops_nn import Rope
from mlsdc.compiler.ops_quant import AppendKvSlice, RopeSlice
from mlsdc.compiler.pipeline import GraphPass
from mlsdc.compiler.rewrite import Rule, apply_rules
from mlsdc.compiler.types import TensorType
from mlsdc.passes.names import beside, free
from mlsdc.passes.stack_weights import may_stack, stackable, stacked


@dataclass(frozen=True)
class FuseQkv(GraphPass):
    """Three reads of the rows become one, and the heads of k and v never exist outside the cache.

    Before::

        %q = linear_q(%h, %w.q)    %q_heads = reshape(%q, shape=[-1, 9, 64])    %q_rope = rope(%q_heads, %rope_table)
        %k = linear_q(%h, %w.k)    %k_heads = reshape(%k, shape=[-1, 3, 64])    %k_rope = rope(%k_heads, %rope_table)
        %v = linear_q(%h, %w.v)    %v_heads = reshape(%v, shape=[-1, 3, 64])
        %kv.1 = append_kv(%kv.0, %k_rope, %v_heads, %tree, layer=0)

    After (the sources of %w.qkv are those of q, k and v, stacked)::

        %qkv = linear_q(%h, %w.qkv)
        %q_rope = rope_slice(%qkv, %rope_table, start=0, heads=9, head_dim=64)
        %kv.1 = append_kv_slice(%kv.0, %qkv, %rope_table, %tree, layer=0, k_start=576, v_start=768)

    A `linear` over f32 rows is fused likewise where its weight was made smaller (int4-a16, fp8, bf16).

    Declines: anything between those ops (a QK-norm); linears of f32 weights; RoPE over a part of a head, or by two tables; a
    value in between or a weight that somebody else reads; weights of different dtypes; a bias on some of the three only; no or several
    candidates for q.
    """

    name: ClassVar[str] = "fuse-qkv"

    def rewrite(self, graph: Graph) -> Graph:
        return apply_rules(graph, RULES)[0]


@dataclass(frozen=True)
class Projection:
    """A linear split into heads[rows, heads, head_dim], with RoPE or not. `result` is what the attention reads."""

    linear: Node
    heads: int
    head_dim: int
    result: Node
    table: str | None


def match_projections(editor: Editor, append: Node) -> tuple[Projection, Projection, Projection] | None:
    """(q, k, v) of the attention whose cache write is `append`, if their linears can be one; else None."""
    k, v = (projection(editor, editor[name]) for name in append.inputs[1:3])
    if k is None or v is None or k.table is None or v.table is not None:
        return None
    if any(editor.only_user(value.result.name) is None for value in (k, v)) or not turns_whole_heads(editor, k):
        return None
    candidates = []
    for linear in editor.users(k.linear.inputs[0]):
        q = query(editor, linear) if linear.name not in (k.linear.name, v.linear.name) else None
        if q is not None and (q.head_dim, q.table) == (k.head_dim, k.table):
            candidates.append(q)
    if len(candidates) != 1 or not stackable(editor, [candidates[0].linear, k.linear, v.linear]):
        return None
    return candidates[0], k, v


def projection(editor: Editor, result: Node) -> Projection | None:
    """linear -> reshape [-> rope], ending in `result`, nobody else reading what lies between."""
    split, table = result, None
    if isinstance(result.op, Rope):
        split, table = editor[result.inputs[0]], result.inputs[1]
        if editor.only_user(split.name) is None:
            return None
    linear = editor.producer(split, 0, Op) if isinstance(split.op, Reshape) else None
    if linear is None or not may_stack(editor, linear) or editor.only_user(linear.name) is None:
        return None
    if not isinstance(split.type, TensorType) or split.type.rank != 3:
        return None
    _, heads, head_dim = split.type.shape
    if not isinstance(heads, int) or not isinstance(head_dim, int):
        return None
    return Projection(linear, heads, head_dim, result, table)


def query(editor: Editor, linear: Node) -> Projection | None:
    """The projection that starts at `linear` and ends in a rope, walked downwards."""
    split = editor.only_user(linear.name) if may_stack(editor, linear) else None
    rope = editor.only_user(split.name) if split else None
    return projection(editor, rope) if rope and isinstance(rope.op, Rope) else None


def turns_whole_heads(editor: Editor, k: Projection) -> bool:
    table = editor[k.table].type if k.table else None
    return isinstance(table, TensorType) and isinstance(half := table.shape[2], int) and 2 * half == k.head_dim


def fuse(editor: Editor, append: Node) -> bool:
    found = match_projections(editor, append)
    if found is None:
        return False
    q, k, v = found
    linears = [q.linear, k.linear, v.linear]
    assert isinstance(append.op, AppendKv)
    assert q.table is not None
    weights = stacked(editor, linears, "qkv")
    name = free(editor, beside(q.linear.name, "qkv"))
    qkv = editor.add(name, q.linear.op, q.linear.inputs[0], *weights, origin=q.linear.origin)
    k_start = q.heads * q.head_dim
    v_start = k_start + k.heads * k.head_dim
    kv, _, _, tree = append.inputs
    editor.replace(q.result.name, RopeSlice(0, q.heads, q.head_dim), qkv, q.table)
    editor.replace(append.name, AppendKvSlice(append.op.layer, k_start, v_start), kv, qkv, q.table, tree)
    return True


RULES = (Rule("rope(q(h)), append_kv(rope(k(h)), v(h)) -> rope_slice(qkv(h)), append_kv_slice(qkv(h))", AppendKv, fuse),)
