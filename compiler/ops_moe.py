"""Ops of a mixture of experts: each row picks a few experts, and each of its slots meets its own expert's rows of a weight."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.compiler.ops import Mismatch, Op, expect_arity, expect_equal, expect_tensor, op
from mlsdc.compiler.ops_nn import WEIGHTS
from mlsdc.compiler.types import GROUP, DType, TensorType, Type

INDEX = (DType.I32, DType.I64)


@op("top_index")
@dataclass(frozen=True)
class TopIndex(Op):
    """Indices of the k largest of the last axis, largest first; ties to the lowest index. x f32[..., n] -> i32[..., k]."""

    k: int

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        x = expect_tensor(inputs[0], "input", dtypes=(DType.F32,))
        n = x.shape[-1]
        if not isinstance(n, int) or not 0 < self.k <= n:
            raise Mismatch(f"cannot take {self.k} of the last axis of {x}")
        return TensorType(DType.I32, (*x.shape[:-1], self.k))


@op("take")
@dataclass(frozen=True)
class Take(Op):
    """`x[row, index[row, i]]`: x f32[rows, n], index i32[rows, k] -> f32[rows, k]."""

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2)
        x = expect_tensor(inputs[0], "input", rank=2, dtypes=(DType.F32,))
        index = expect_tensor(inputs[1], "index", rank=2, dtypes=INDEX)
        expect_equal(index.shape[0], x.shape[0], "rows of the index")
        return x.with_shape(*index.shape)


@op("expert_linear")
@dataclass(frozen=True)
class ExpertLinear(Op):
    """Slot s of row r meets expert e = index[r, s]: `x[r, s] @ weight[e n : (e + 1) n]^T (+ bias[e])`.

    x f32[rows, 1, k] (every slot sees the same) or f32[rows, slots, k]; weight [experts n, k]; index i32[rows, slots]; bias
    f32[experts, n] -> f32[rows, slots, n]. Rows of experts that no slot names are not read.
    """

    experts: int

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 3, 4)
        x = expect_tensor(inputs[0], "input", rank=3, dtypes=(DType.F32,))
        weight = expect_tensor(inputs[1], "weight", rank=2, dtypes=WEIGHTS)
        index = expect_tensor(inputs[2], "index", rank=2, dtypes=INDEX)
        expect_equal(weight.shape[1], x.shape[2], "columns of the weight")
        if x.shape[1] not in (1, index.shape[1]):
            raise Mismatch(f"{x} has neither one slot nor those of {index}")
        return TensorType(DType.F32, (*index.shape, columns(self.experts, weight)))


@op("expert_linear_q")
@dataclass(frozen=True)
class ExpertLinearQ(Op):
    """`expert_linear` by int8 dots, as linear_q does them: h a8[rows, inputs k], where slot s meets columns s k of `inputs` > 1 slots."""

    experts: int
    inputs: int = 1
    bias: bool = False

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 3 + self.bias)
        h = expect_tensor(inputs[0], "input", rank=2, dtypes=(DType.A8, DType.A16))
        weight = expect_tensor(inputs[1], "weight", rank=2, dtypes=(DType.Q8, DType.Q4))
        index = expect_tensor(inputs[2], "index", rank=2, dtypes=INDEX)
        k = weight.shape[1]
        if not isinstance(k, int) or k % GROUP or self.inputs * k != h.shape[1] or self.inputs not in (1, index.shape[1]):
            raise Mismatch(f"{h} is not {self.inputs} slots of the {k} columns of {weight}")
        return TensorType(DType.F32, (*index.shape, columns(self.experts, weight)))


def columns(experts: int, weight: TensorType) -> int:
    """Rows of the weight that are one expert's."""
    rows = weight.shape[0]
    if not isinstance(rows, int) or experts < 1 or rows % experts:
        raise Mismatch(f"{weight} does not divide into {experts} experts")
    return rows // experts


def pairs_alone(experts: int, slots: int) -> int:
    """Rows, a power of two, up to which a GPU's kernels read an expert's weight once for each pair (row, slot): at most as many pairs as
    there are experts. With more rows pairs are sorted by expert, and an expert's weight is read once."""
    return 1 << max(experts // slots, 1).bit_length() - 1
