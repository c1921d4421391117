"""Ops of a decoder-only transformer, as raising makes them: every row on its own, but for attention."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.compiler.ops import Mismatch, Op, expect_arity, expect_equal, expect_tensor, op
from mlsdc.compiler.types import DType, TensorType, Type

WEIGHTS = (DType.F32, DType.F16, DType.BF16, DType.Q8, DType.Q4, DType.F8)


@op("embed")
@dataclass(frozen=True)
class Embed(Op):
    """`table[tokens] * scale`: tokens i32[rows], table [vocab, hidden] -> f32[rows, hidden]."""

    scale: float = 1.0

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2)
        tokens = expect_tensor(inputs[0], "tokens", dtypes=(DType.I32, DType.I64))
        table = expect_tensor(inputs[1], "table", rank=2, dtypes=WEIGHTS)
        return TensorType(DType.F32, (*tokens.shape, table.shape[1]))


@op("linear")
@dataclass(frozen=True)
class Linear(Op):
    """`x @ weight^T (+ bias)`: x f32[..., k], weight [n, k], bias f32[n] -> f32[..., n]."""

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2, 3)
        x = expect_tensor(inputs[0], "input", dtypes=(DType.F32,))
        weight = expect_tensor(inputs[1], "weight", rank=2, dtypes=WEIGHTS)
        expect_equal(weight.shape[1], x.shape[-1], "columns of the weight")
        if len(inputs) == 3:
            expect_equal(expect_tensor(inputs[2], "bias").shape, (weight.shape[0],), "shape of the bias")
        return TensorType(DType.F32, (*x.shape[:-1], weight.shape[0]))


@op("gated")
@dataclass(frozen=True)
class Gated(Op):
    """`act(gate) * up` with (gate | up) = x @ weight^T: x f32[rows, k], weight [2n, k] with gate's rows first -> f32[rows, n].

    act: silu or gelu_tanh.
    """

    act: str = "silu"

    def infer(self, *inputs: Type) -> Type:
        return gated_type(self.act, inputs, WEIGHTS)


def gated_type(act: str, inputs: tuple[Type, ...], weights: tuple[DType, ...]) -> TensorType:
    """The type rule of gated MLPs over f32 rows, whose weight is one of `weights`. Raises Mismatch."""
    expect_arity(inputs, 2)
    x = expect_tensor(inputs[0], "input", rank=2, dtypes=(DType.F32,))
    weight = expect_tensor(inputs[1], "weight", rank=2, dtypes=weights)
    expect_equal(weight.shape[1], x.shape[1], "columns of the weight")
    double = weight.shape[0]
    if act not in ("silu", "gelu_tanh"):
        raise Mismatch(f"act '{act}' is not silu or gelu_tanh")
    if not isinstance(double, int) or double % 2:
        raise Mismatch(f"weight {weight} does not split into gate and up")
    return TensorType(DType.F32, (x.shape[0], double // 2))


@op("rms_norm")
@dataclass(frozen=True)
class RmsNorm(Op):
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last axis (Gemma: offset 1)."""

    eps: float
    offset: float = 0.0

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2)
        x = expect_tensor(inputs[0], "input", dtypes=(DType.F32,))
        weight = expect_tensor(inputs[1], "weight", rank=1)
        expect_equal(weight.shape[0], x.shape[-1], "length of the weight")
        return x


@op("rope_table")
@dataclass(frozen=True)
class RopeTable(Op):
    """Cosine and sine of each row's angles, once per step: positions i32[rows], inv_freq f32[d/2] -> f32[rows, 2, d/2].

    angle = float32(position) * inv_freq; both are multiplied by `scaling` (YaRN's attention factor).
    """

    scaling: float = 1.0

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2)
        positions = expect_tensor(inputs[0], "positions", rank=1, dtypes=(DType.I32,))
        inv_freq = expect_tensor(inputs[1], "inv_freq", rank=1, dtypes=(DType.F32,))
        return TensorType(DType.F32, (positions.shape[0], 2, inv_freq.shape[0]))


@op("rope")
@dataclass(frozen=True)
class Rope(Op):
    """Rotary embedding of x[rows, heads, d] by table[rows, 2, r/2]; the first r channels turn, in halves (channel i with i + r/2)."""

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2)
        x = expect_tensor(inputs[0], "input", rank=3, dtypes=(DType.F32,))
        table = expect_tensor(inputs[1], "table", rank=3, dtypes=(DType.F32,))
        expect_equal(table.shape[0], x.shape[0], "rows of the table")
        half, dim = table.shape[2], x.shape[2]
        if not isinstance(half, int) or not isinstance(dim, int) or 2 * half > dim:
            raise Mismatch(f"table {table} turns more channels than {x} has")
        return x


@op("attention")
@dataclass(frozen=True)
class Attention(Op):
    """Causal attention of one sequence's rows over themselves: q[rows, heads, d], k and v[rows, kv_heads, d] -> [rows, heads, d].

    softmax(softcap(q k^T * scale)) v; head h reads kv head h // (heads / kv_heads). `window` > 0: the last `window` positions only.
    `softcap` > 0: s -> softcap * tanh(s / softcap).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 3)
        q, k, v = (expect_tensor(t, what, rank=3, dtypes=(DType.F32,)) for t, what in zip(inputs, ("q", "k", "v"), strict=True))
        expect_equal(v.shape, k.shape, "shape of v")
        expect_equal((k.shape[0], k.shape[2]), (q.shape[0], q.shape[2]), "rows and head_dim of k")
        check_heads(q.shape[1], k.shape[1])
        return q


@op("pad_heads")
@dataclass(frozen=True)
class PadHeads(Op):
    """x f32[rows, n, d] -> f32[rows, heads, d]: heads of zeros behind its own."""

    heads: int

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        x = expect_tensor(inputs[0], "input", rank=3, dtypes=(DType.F32,))
        own = x.shape[1]
        if not isinstance(own, int) or self.heads < own:
            raise Mismatch(f"cannot pad {x} to {self.heads} heads")
        return x.with_shape(x.shape[0], self.heads, x.shape[2])


def check_heads(heads: object, kv_heads: object) -> None:
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads % kv_heads:
        raise Mismatch(f"{heads} heads do not divide into {kv_heads} kv heads")
