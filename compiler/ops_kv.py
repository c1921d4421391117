"""Ops over the paged KV cache and the step's tree, unfused and fused.

Key j of a row is the token at position j on the row's own path: a committed position is read from its page, a drafted one from
the slot of the row's own ancestor (law L2: `ctx` runs over logical positions, whatever the tree).
"""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.compiler.ops import Mismatch, Op, expect_arity, expect_equal, expect_tensor, op
from mlsdc.compiler.ops_nn import check_heads
from mlsdc.compiler.types import DType, KvType, Size, TensorType, TreeType, Type
from mlsdc.runtime.kv_format import parse_format


def stored_as(format: str, layer: int) -> DType:
    """Type of what `read_kv` gives: the stored numbers where they are plain ones, else what code and scale stand for."""
    kv, others = parse_format(format)
    return DType.BF16 if others.get(layer, kv).name == "bf16" else DType.F32


def expect_kv(type_: Type, layer: int) -> KvType:
    if not isinstance(type_, KvType):
        raise Mismatch(f"kv expects a KV cache, found {type_}")
    if not 0 <= layer < type_.num_layers:
        raise Mismatch(f"layer {layer} is outside {type_}")
    return type_


def expect_tree(type_: Type) -> None:
    if not isinstance(type_, TreeType):
        raise Mismatch(f"tree expects the step's tree, found {type_}")


@op("append_kv")
@dataclass(frozen=True)
class AppendKv(Op):
    """Write the rows' k and v [rows, kv_heads, d] (k after RoPE) to their page or scratch slot -> the cache with them in it."""

    layer: int

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 4)
        kv = expect_kv(inputs[0], self.layer)
        for type_, what in ((inputs[1], "k"), (inputs[2], "v")):
            tensor = expect_tensor(type_, what, rank=3, dtypes=(DType.F32,))
            expect_equal(tensor.shape[1:], (kv.num_kv_heads, kv.head_dim), f"heads and head_dim of {what}")
        expect_tree(inputs[3])
        return kv


@op("read_kv")
@dataclass(frozen=True)
class ReadKv(Op):
    """Every row's keys or values gathered by position, as stored: (kv, tree) -> [rows, kv_heads, ctx, d]. `which` is `keys` or `values`.

    `ctx` is the longest context of the step. Positions a row does not see hold zeros. `coarse`: of a
    nested format (int8n) its high plane alone is read.
    """

    layer: int
    which: str
    rows: Size
    ctx: Size
    coarse: bool = False

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2)
        kv = expect_kv(inputs[0], self.layer)
        expect_tree(inputs[1])
        if self.which not in ("keys", "values"):
            raise Mismatch(f"which '{self.which}' is not keys or values")
        return TensorType(stored_as(kv.format, self.layer), (self.rows, kv.num_kv_heads, self.ctx, kv.head_dim))


@op("dequantise")
@dataclass(frozen=True)
class Dequantise(Op):
    """Stored KV elements -> f32, same shape."""

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        return expect_tensor(inputs[0], "input").with_dtype(DType.F32)


@op("matmul_qk")
@dataclass(frozen=True)
class MatMulQK(Op):
    """`q k^T * scale` per row and head: q[rows, heads, d], k[rows, kv_heads, ctx, d] -> f32[rows, heads, ctx]; softcap as in attention."""

    scale: float
    softcap: float = 0.0

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2)
        q = expect_tensor(inputs[0], "q", rank=3, dtypes=(DType.F32,))
        k = expect_tensor(inputs[1], "k", rank=4, dtypes=(DType.F32,))
        expect_equal((k.shape[0], k.shape[3]), (q.shape[0], q.shape[2]), "rows and head_dim of k")
        check_heads(q.shape[1], k.shape[1])
        return q.with_shape(q.shape[0], q.shape[1], k.shape[2])


@op("tree_mask")
@dataclass(frozen=True)
class TreeMask(Op):
    """Which positions each row at p sees: bool[rows, ctx]; true iff p - window < j <= p (window 0: j <= p) or j < sinks."""

    rows: Size
    ctx: Size
    window: int = 0
    sinks: int = 0

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        expect_tree(inputs[0])
        return TensorType(DType.BOOL, (self.rows, self.ctx))


@op("mask")
@dataclass(frozen=True)
class Mask(Op):
    """Scores[rows, heads, ctx] where mask[rows, ctx] holds, -inf elsewhere."""

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2)
        scores = expect_tensor(inputs[0], "scores", rank=3, dtypes=(DType.F32,))
        mask = expect_tensor(inputs[1], "mask", rank=2, dtypes=(DType.BOOL,))
        expect_equal(mask.shape, (scores.shape[0], scores.shape[2]), "shape of the mask")
        return scores


@op("matmul_pv")
@dataclass(frozen=True)
class MatMulPV(Op):
    """`p v` per row and head: p[rows, heads, ctx], v[rows, kv_heads, ctx, d] -> f32[rows, heads, d]."""

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2)
        p = expect_tensor(inputs[0], "p", rank=3, dtypes=(DType.F32,))
        v = expect_tensor(inputs[1], "v", rank=4, dtypes=(DType.F32,))
        expect_equal((v.shape[0], v.shape[2]), (p.shape[0], p.shape[2]), "rows and ctx of v")
        check_heads(p.shape[1], v.shape[1])
        return p.with_shape(p.shape[0], p.shape[1], v.shape[3])


@op("paged_attention")
@dataclass(frozen=True)
class PagedAttention(Op):
    """The fused node: dequantise -> matmul -> mask -> softmax -> matmul over pages and scratch, in one kernel.

    (q f32[rows, heads, d], kv, tree) -> f32[rows, heads, d], or a8[rows, heads * d] with `quantise`.
    Blocks of 64 positions, combined in order (law L2). With a `window` the first `sinks` positions are seen, too.
    """

    layer: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    quantise: bool = False
    sinks: int = 0
    coarse: bool = False

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 3)
        q = expect_tensor(inputs[0], "q", rank=3, dtypes=(DType.F32,))
        kv = expect_kv(inputs[1], self.layer)
        expect_tree(inputs[2])
        expect_equal(q.shape[2], kv.head_dim, "head_dim of q")
        check_heads(q.shape[1], kv.num_kv_heads)
        if not self.quantise:
            return q
        assert isinstance(q.shape[1], int)
        return TensorType(DType.A8, (q.shape[0], q.shape[1] * kv.head_dim))
