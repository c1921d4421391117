"""Quantised linears and the fusions around them. `h` is a8[rows, k]; weights are q8, q4 (or f8) [n, k]; results are f32 unless said."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.compiler.ops import Mismatch, Op, expect_arity, expect_equal, expect_tensor, op
from mlsdc.compiler.ops_kv import expect_kv, expect_tree
from mlsdc.compiler.ops_nn import gated_type
from mlsdc.compiler.types import GROUP, DType, TensorType, Type

PACKED = (DType.Q8, DType.Q4)


def quantised(x: TensorType, fine: tuple[int, ...] = ()) -> TensorType:
    last = x.shape[-1]
    if not isinstance(last, int) or last % GROUP:
        raise Mismatch(f"cannot quantise {x}: the last axis must be a multiple of {GROUP}")
    if not all(0 <= group < last // GROUP for group in fine) or len(set(fine)) < len(fine):
        raise Mismatch(f"fine groups {list(fine)} are not groups of {x}, each once")
    return TensorType(DType.A16 if fine else DType.A8, x.shape)


@op("quantise")
@dataclass(frozen=True)
class Quantise(Op):
    """x f32[rows, k] -> a8[rows, k]: per row and group of 32, scale = max|x| / 127, q = round(x / scale) to nearest even.

    `fine`: groups with a second plane (a16).
    """

    fine: tuple[int, ...] = ()

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        return quantised(expect_tensor(inputs[0], "input", rank=2, dtypes=(DType.F32,)), self.fine)


@op("calibrated")
@dataclass(frozen=True)
class Calibrated(Op):
    """x itself, f32[rows, k], and what a calibration saw: the groups of 32 columns whose values are large enough for a second plane."""

    fine: tuple[int, ...]

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        x = expect_tensor(inputs[0], "input", rank=2, dtypes=(DType.F32,))
        quantised(x, self.fine)
        return x


@op("linear_q")
@dataclass(frozen=True)
class LinearQ(Op):
    """`h @ weight^T`, int8 dots per group of 32, scales in f32; then `+ bias` and `+ residual` where there are such inputs.

    Inputs: h, weight, then bias f32[n] if `bias`, then residual f32[rows, n] if `residual`.
    """

    bias: bool = False
    residual: bool = False

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2 + self.bias + self.residual)
        h = expect_tensor(inputs[0], "input", rank=2, dtypes=(DType.A8, DType.A16))
        weight = expect_tensor(inputs[1], "weight", rank=2, dtypes=PACKED)
        expect_equal(weight.shape[1], h.shape[1], "columns of the weight")
        out = TensorType(DType.F32, (h.shape[0], weight.shape[0]))
        if self.bias:
            expect_equal(expect_tensor(inputs[2], "bias").shape, (weight.shape[0],), "shape of the bias")
        if self.residual:
            expect_equal(inputs[-1], out, "type of the residual")
        return out


@op("linear_f8")
@dataclass(frozen=True)
class LinearF8(Op):
    """`e4m3(x) @ weight^T`: x f32[rows, k] becomes e4m3 and a scale = max|x| / 448 a row, weight f8 [n, k]; sums in f32, then `* x.scale *
    weight.scale`, `+ bias` and `+ residual` where there are such inputs.

    Inputs: x, weight, then bias f32[n] if `bias`, then residual f32[rows, n] if `residual`. The scale is a row's own, not one for all rows:
    what a row gives must not depend on the rows beside it (law L2).
    """

    bias: bool = False
    residual: bool = False

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2 + self.bias + self.residual)
        x = expect_tensor(inputs[0], "input", rank=2, dtypes=(DType.F32,))
        weight = expect_tensor(inputs[1], "weight", rank=2, dtypes=(DType.F8,))
        expect_equal(weight.shape[1], x.shape[1], "columns of the weight")
        out = TensorType(DType.F32, (x.shape[0], weight.shape[0]))
        if self.bias:
            expect_equal(expect_tensor(inputs[2], "bias").shape, (weight.shape[0],), "shape of the bias")
        if self.residual:
            expect_equal(inputs[-1], out, "type of the residual")
        return out


@op("gated_f8")
@dataclass(frozen=True)
class GatedF8(Op):
    """`act(gate) * up` with (gate | up) as linear_f8 has them: x f32[rows, k], weight f8 [2n, k] with gate's rows first -> f32[rows, n].

    act: silu or gelu_tanh.
    """

    act: str = "silu"

    def infer(self, *inputs: Type) -> Type:
        return gated_type(self.act, inputs, (DType.F8,))


@op("norm_quantise")
@dataclass(frozen=True)
class NormQuantise(Op):
    """quantise(rms_norm(x, weight)): x f32[rows, k] -> a8[rows, k]. `fine`: groups with a second plane (a16)."""

    eps: float
    offset: float = 0.0
    fine: tuple[int, ...] = ()

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2)
        x = expect_tensor(inputs[0], "input", rank=2, dtypes=(DType.F32,))
        weight = expect_tensor(inputs[1], "weight", rank=1)
        expect_equal(weight.shape[0], x.shape[1], "length of the weight")
        return quantised(x, self.fine)


@op("gated_quantise")
@dataclass(frozen=True)
class GatedQuantise(Op):
    """quantise(act(gate) * up) with (gate | up) = h @ weight^T, weight [2n, k] with gate's rows first -> a8[rows, n].

    act: silu or gelu_tanh.
    """

    act: str = "silu"

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2)
        h = expect_tensor(inputs[0], "input", rank=2, dtypes=(DType.A8, DType.A16))
        weight = expect_tensor(inputs[1], "weight", rank=2, dtypes=PACKED)
        expect_equal(weight.shape[1], h.shape[1], "columns of the weight")
        double = weight.shape[0]
        if self.act not in ("silu", "gelu_tanh"):
            raise Mismatch(f"act '{self.act}' is not silu or gelu_tanh")
        if not isinstance(double, int) or double % (2 * GROUP):
            raise Mismatch(f"weight {weight} does not split into gate and up of whole groups")
        return TensorType(DType.A8, (h.shape[0], double // 2))


@op("rope_slice")
@dataclass(frozen=True)
class RopeSlice(Op):
    """Heads start.. of the fused projection, after RoPE: x f32[rows, n], table f32[rows, 2, d/2] -> f32[rows, heads, d].

    `start` counts columns.
    """

    start: int
    heads: int
    head_dim: int

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2)
        x = expect_tensor(inputs[0], "input", rank=2, dtypes=(DType.F32,))
        expect_tensor(inputs[1], "table", rank=3, dtypes=(DType.F32,))
        columns = x.shape[1]
        if not isinstance(columns, int) or self.start + self.heads * self.head_dim > columns:
            raise Mismatch(f"columns {self.start}..{self.start + self.heads * self.head_dim} are outside {x}")
        return x.with_shape(x.shape[0], self.heads, self.head_dim)


@op("append_kv_slice")
@dataclass(frozen=True)
class AppendKvSlice(Op):
    """append_kv straight from the fused projection: (kv, x f32[rows, n], table, tree) -> kv.

    k (before RoPE) and v start at the given columns.
    """

    layer: int
    k_start: int
    v_start: int

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 4)
        kv = expect_kv(inputs[0], self.layer)
        x = expect_tensor(inputs[1], "input", rank=2, dtypes=(DType.F32,))
        expect_tensor(inputs[2], "table", rank=3, dtypes=(DType.F32,))
        expect_tree(inputs[3])
        width = kv.num_kv_heads * kv.head_dim
        columns = x.shape[1]
        if not isinstance(columns, int) or max(self.k_start, self.v_start) + width > columns:
            raise Mismatch(f"k at {self.k_start} and v at {self.v_start} of width {width} are outside {x}")
        return kv
