"""Core and transformer ops of the reference interpreter, one function an op: `(op, inputs, context) -> value`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from mlsdc.compiler import ops_core, ops_nn
from mlsdc.compiler.interpret_state import KvState, StepTree
from mlsdc.compiler.ops import Op
from mlsdc.compiler.quantise import A8, A16, F8, Q4, Q8
from mlsdc.compiler.types import DType

Tensor: TypeAlias = torch.Tensor
Value: TypeAlias = "Tensor | A8 | A16 | Q8 | Q4 | F8 | KvState | StepTree"


@dataclass(frozen=True)
class Context:
    """What every op sees: the torch dtype that stands for f32 (float32, or float64 for an oracle's oracle)."""

    real: torch.dtype = torch.float32

    def dtype(self, dtype: DType) -> torch.dtype:
        """The torch dtype of an unpacked IR dtype."""
        return self.real if dtype is DType.F32 else TORCH[dtype]


TORCH = {
    DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16, DType.I8: torch.int8, DType.U8: torch.uint8,
    DType.I32: torch.int32, DType.I64: torch.int64, DType.BOOL: torch.bool,
}  # fmt: skip

Eval: TypeAlias = Callable[[Any, tuple[Any, ...], Context], Value]
EVAL: dict[type[Op], Eval] = {}
E = TypeVar("E", bound=Eval)


def evaluates(kind: type[Op]) -> Callable[[E], E]:
    """Register the function as the meaning of an op."""

    def register(function: E) -> E:
        EVAL[kind] = function
        return function

    return register


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg, "exp": torch.exp, "rsqrt": torch.rsqrt, "sqrt": torch.sqrt, "cos": torch.cos, "sin": torch.sin, "tanh": torch.tanh,
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "sigmoid": torch.sigmoid, "abs": torch.abs,
}  # fmt: skip
BINARY: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": torch.pow,
    "maximum": torch.maximum, "minimum": torch.minimum,
}  # fmt: skip
REDUCE: dict[str, Callable[..., Tensor]] = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax}


@evaluates(ops_core.Unary)
def unary(op: ops_core.Unary, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return UNARY[op.fn](inputs[0])


@evaluates(ops_core.Binary)
def binary(op: ops_core.Binary, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return BINARY[op.fn](inputs[0], inputs[1]).to(inputs[0].dtype)


@evaluates(ops_core.Scalar)
def scalar(op: ops_core.Scalar, inputs: tuple[Tensor, ...], context: Context) -> Value:
    (x,) = inputs
    return BINARY[op.fn](x, torch.tensor(op.value, dtype=x.dtype)).to(x.dtype)


@evaluates(ops_core.Reduce)
def reduce(op: ops_core.Reduce, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return REDUCE[op.fn](inputs[0], dim=op.axis, keepdim=True).to(inputs[0].dtype)


@evaluates(ops_core.Cast)
def cast(op: ops_core.Cast, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return inputs[0].to(context.dtype(op.dtype))


@evaluates(ops_core.Reshape)
def reshape(op: ops_core.Reshape, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return inputs[0].reshape(op.shape)


@evaluates(ops_core.Transpose)
def transpose(op: ops_core.Transpose, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return inputs[0].transpose(op.a, op.b)


@evaluates(ops_core.Slice)
def slice_(op: ops_core.Slice, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return inputs[0].narrow(op.axis, op.start, op.end - op.start)


@evaluates(ops_core.Cat)
def cat(op: ops_core.Cat, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return torch.cat(inputs, dim=op.axis)


@evaluates(ops_core.Expand)
def expand(op: ops_core.Expand, inputs: tuple[Tensor, ...], context: Context) -> Value:
    (x,) = inputs
    return x.reshape((1,) * (len(op.shape) - x.dim()) + tuple(x.shape)).expand(op.shape)


@evaluates(ops_core.MatMul)
def matmul(op: ops_core.MatMul, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return torch.matmul(inputs[0], inputs[1])


@evaluates(ops_core.Softmax)
def softmax(op: ops_core.Softmax, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return torch.softmax(inputs[0], dim=-1)


@evaluates(ops_core.ArgMax)
def argmax(op: ops_core.ArgMax, inputs: tuple[Tensor, ...], context: Context) -> Value:
    x = inputs[0].numpy()
    return torch.from_numpy(np.asarray(x[..., : op.limit or None].argmax(-1), np.int32))  # numpy promises the first of equals


@evaluates(ops_core.GatherRows)
def gather_rows(op: ops_core.GatherRows, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return inputs[0].index_select(0, inputs[1])


def real(weight: Tensor | Q8 | Q4 | F8, context: Context) -> Tensor:
    """A weight, packed or not, as a plain tensor of the context's dtype."""
    if isinstance(weight, Q8 | Q4 | F8):
        return torch.from_numpy(weight.dequantise()).to(context.real)
    return weight.to(context.real)


@evaluates(ops_nn.Embed)
def embed(op: ops_nn.Embed, inputs: tuple[Any, ...], context: Context) -> Value:
    tokens, table = inputs
    flat = tokens.reshape(-1)
    rows = table[flat.numpy()] if isinstance(table, Q8 | Q4 | F8) else table.index_select(0, flat)
    return real(rows, context).reshape(*tokens.shape, -1) * op.scale


@evaluates(ops_nn.Linear)
def linear(op: ops_nn.Linear, inputs: tuple[Any, ...], context: Context) -> Value:
    x, weight, *bias = inputs
    return F.linear(x, real(weight, context), bias[0].to(context.real) if bias else None)


@evaluates(ops_nn.Gated)
def gated(op: ops_nn.Gated, inputs: tuple[Any, ...], context: Context) -> Value:
    gate, up = F.linear(inputs[0], real(inputs[1], context)).chunk(2, dim=-1)
    return UNARY[op.act](gate) * up


@evaluates(ops_nn.RmsNorm)
def rms_norm(op: ops_nn.RmsNorm, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return normalised(inputs[0], inputs[1], op.eps, op.offset)


def normalised(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.to(x.dtype) + offset)


@evaluates(ops_nn.RopeTable)
def rope_table(op: ops_nn.RopeTable, inputs: tuple[Tensor, ...], context: Context) -> Value:
    positions, inv_freq = inputs
    # The angle is the f32 product by definition, in the f64 interpreter too: the checkpoint was trained with it.
    angles = (positions.to(torch.float32)[:, None] * inv_freq.to(torch.float32)).to(context.real)
    return torch.stack((angles.cos(), angles.sin()), dim=1) * op.scaling


@evaluates(ops_nn.Rope)
def rope(op: ops_nn.Rope, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return rotated(inputs[0], inputs[1])


def rotated(x: Tensor, table: Tensor) -> Tensor:
    """x[rows, heads, d] turned by table[rows, 2, r/2]."""
    cos, sin = table[:, 0, None], table[:, 1, None]
    half = table.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


@evaluates(ops_nn.Attention)
def attention(op: ops_nn.Attention, inputs: tuple[Tensor, ...], context: Context) -> Value:
    q, k, v = inputs
    rows, repeats = q.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = capped(torch.einsum("ihd,jhd->hij", q, k) * op.scale, op.softcap)
    distance = torch.arange(rows)[:, None] - torch.arange(rows)
    seen = (distance >= 0) & ((distance < op.window) if op.window else True)
    return torch.einsum("hij,jhd->ihd", torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1), v)


@evaluates(ops_nn.PadHeads)
def pad_heads(op: ops_nn.PadHeads, inputs: tuple[Tensor, ...], context: Context) -> Value:
    return F.pad(inputs[0], (0, 0, 0, op.heads - inputs[0].shape[1]))


def capped(scores: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap else scores
