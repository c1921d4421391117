"""Ops of drafting levels' programs."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.compiler.ops import Mismatch, Op, expect_arity, expect_tensor, op
from mlsdc.compiler.types import DType, Type


@op("top_k")
@dataclass(frozen=True)
class TopK(Op):
    """The k largest of the last axis: x f32[rows, n] -> f32[rows, 2 k + 1].

    First the values less the largest one, best first; then their indices (whole numbers); then the sum of exp(x - largest) over the row:
    log p of entry i is y[i] - log(y[2 k]). Of equal values the lowest index comes first.
    """

    k: int

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        x = expect_tensor(inputs[0], "input", rank=2, dtypes=(DType.F32,))
        n = x.shape[1]
        if not isinstance(n, int) or not 1 <= self.k <= min(n, 32):
            raise Mismatch(f"cannot take the {self.k} largest of {x}; 1 to 32 are allowed")
        return x.with_shape(x.shape[0], 2 * self.k + 1)
