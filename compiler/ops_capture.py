"""Ops that only a captured graph has: what depends on the sequence's length alone, and torch's attention. Raising removes them all."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.compiler.ops import Mismatch, Op, expect_arity, expect_equal, expect_tensor, op
from mlsdc.compiler.ops_nn import check_heads
from mlsdc.compiler.types import DType, TensorType, Type

TOKENS = (DType.I32, DType.I64)


@op("positions")
@dataclass(frozen=True)
class Positions(Op):
    """0, 1, 2, ... along the sequence of tokens[1, seq] -> i32[seq]."""

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        tokens = expect_tensor(inputs[0], "tokens", rank=2, dtypes=TOKENS)
        return TensorType(DType.I32, (tokens.shape[1],))


@op("causal_mask")
@dataclass(frozen=True)
class CausalMask(Op):
    """Which keys j each query p sees: p - window < j <= p (window 0: j <= p). tokens[1, seq] -> bool[seq, seq].

    `additive`: f32 instead, 0 where a query sees the key and the lowest f32 elsewhere, to be added to scores.
    """

    window: int = 0
    additive: bool = False

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        tokens = expect_tensor(inputs[0], "tokens", rank=2, dtypes=TOKENS)
        return TensorType(DType.F32 if self.additive else DType.BOOL, (tokens.shape[1], tokens.shape[1]))


@op("sdpa")
@dataclass(frozen=True)
class Sdpa(Op):
    """torch's scaled_dot_product_attention: q[1, heads, seq, d], k and v[1, kv_heads, seq, d], maybe a mask[seq, seq] -> q's type.

    `causal` without a mask: query p sees keys j <= p. Head h reads kv head h // (heads / kv_heads). A mask is bool (what is seen) or
    f32 (added).
    """

    scale: float
    causal: bool = False

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 3, 4)
        q, k, v = (expect_tensor(t, what, rank=4, dtypes=(DType.F32,)) for t, what in zip(inputs[:3], ("q", "k", "v"), strict=True))
        expect_equal(v.shape, k.shape, "shape of v")
        expect_equal((k.shape[0], k.shape[2:]), (q.shape[0], q.shape[2:]), "batch, sequence and head_dim of k")
        check_heads(q.shape[1], k.shape[1])
        if len(inputs) == 4:
            mask = expect_tensor(inputs[3], "mask", rank=2, dtypes=(DType.BOOL, DType.F32))
            expect_equal(mask.shape, (q.shape[2], q.shape[2]), "shape of the mask")
            if self.causal:
                raise Mismatch("takes a mask or causal=true, not both")
        return q
