"""Ops between the ranks of a model that is split over several processes (tensor parallelism)."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.compiler.ops import Mismatch, Op, expect_arity, expect_tensor, op
from mlsdc.compiler.types import DType, Type


@op("all_reduce")
@dataclass(frozen=True)
class AllReduce(Op):
    """The sum over `ranks` processes, in order of rank, of what each has for x f32[rows, n]; every rank gets it.

    One process alone cannot compute it; the interpreter says so.
    """

    ranks: int

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        if self.ranks < 2:
            raise Mismatch(f"over {self.ranks} ranks, expected 2 or more")
        return expect_tensor(inputs[0], "input", rank=2, dtypes=(DType.F32,))
