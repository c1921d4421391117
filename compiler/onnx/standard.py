"""Ops as standard ONNX operators (opset 20): one rule an op. Ops without a rule become nodes of a domain of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mlsdc.compiler import ops_capture, ops_core, ops_moe, ops_nn
from mlsdc.compiler.onnx.emit import ELEMENTS, Emit
from mlsdc.compiler.ops import Op
from mlsdc.compiler.types import DType

Rule = Callable[[Emit, Any, tuple[str, ...]], str]
RULES: dict[type[Op], Rule] = {}
R = TypeVar("R", bound=Rule)
LOWEST = float(np.finfo(np.float32).min)


def writes(kind: type[Op]) -> Callable[[R], R]:
    def register(rule: R) -> R:
        RULES[kind] = rule
        return rule

    return register


UNARY = {"neg": "Neg", "exp": "Exp", "sqrt": "Sqrt", "cos": "Cos", "sin": "Sin", "tanh": "Tanh", "sigmoid": "Sigmoid", "abs": "Abs"}
BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow", "maximum": "Max", "minimum": "Min"}
REDUCE = {"mean": "ReduceMean", "sum": "ReduceSum", "max": "ReduceMax"}


@writes(ops_core.Unary)
def unary(e: Emit, op: ops_core.Unary, x: tuple[str, ...]) -> str:
    if op.fn == "rsqrt":
        return e.result("Reciprocal", e.op("Sqrt", *x))
    if op.fn == "silu":
        return e.result("Mul", *x, e.op("Sigmoid", *x))
    if op.fn in ("gelu", "gelu_tanh"):
        return e.result("Gelu", *x, approximate="tanh" if op.fn == "gelu_tanh" else "none")
    return e.result(UNARY[op.fn], *x)


@writes(ops_core.Binary)
def binary(e: Emit, op: ops_core.Binary, x: tuple[str, ...]) -> str:
    return e.result(BINARY[op.fn], *x)


@writes(ops_core.Scalar)
def scalar(e: Emit, op: ops_core.Scalar, x: tuple[str, ...]) -> str:
    return e.result(BINARY[op.fn], *x, e.like(op.value, x[0]))


@writes(ops_core.Reduce)
def reduce(e: Emit, op: ops_core.Reduce, x: tuple[str, ...]) -> str:
    return e.result(REDUCE[op.fn], *x, e.sizes(op.axis), keepdims=1)


@writes(ops_core.Cast)
def cast(e: Emit, op: ops_core.Cast, x: tuple[str, ...]) -> str:
    return e.result("Cast", *x, to=ELEMENTS[op.dtype])


@writes(ops_core.Reshape)
def reshape(e: Emit, op: ops_core.Reshape, x: tuple[str, ...]) -> str:
    return e.result("Reshape", *x, e.sizes(*op.shape))


@writes(ops_core.Transpose)
def transpose(e: Emit, op: ops_core.Transpose, x: tuple[str, ...]) -> str:
    order = list(range(e.type(x[0]).rank))
    order[op.a], order[op.b] = order[op.b], order[op.a]
    return e.result("Transpose", *x, perm=order)


@writes(ops_core.Slice)
def slice_(e: Emit, op: ops_core.Slice, x: tuple[str, ...]) -> str:
    return e.slice(x[0], op.axis, op.start, op.end, e.node.name)


@writes(ops_core.Cat)
def cat(e: Emit, op: ops_core.Cat, x: tuple[str, ...]) -> str:
    return e.result("Concat", *x, axis=op.axis)


@writes(ops_core.Expand)
def expand(e: Emit, op: ops_core.Expand, x: tuple[str, ...]) -> str:
    return e.result("Expand", *x, e.sizes(*(1 if size == -1 else size for size in op.shape)))  # Expand broadcasts both ways


@writes(ops_core.MatMul)
def matmul(e: Emit, op: ops_core.MatMul, x: tuple[str, ...]) -> str:
    return e.result("MatMul", *x)


@writes(ops_core.Softmax)
def softmax(e: Emit, op: ops_core.Softmax, x: tuple[str, ...]) -> str:
    return e.result("Softmax", *x, axis=-1)


@writes(ops_core.ArgMax)
def argmax(e: Emit, op: ops_core.ArgMax, x: tuple[str, ...]) -> str:
    seen = e.slice(x[0], -1, 0, op.limit) if op.limit else x[0]
    return e.result("Cast", e.op("ArgMax", seen, axis=-1, keepdims=0), to=ELEMENTS[DType.I32])


@writes(ops_core.GatherRows)
def gather_rows(e: Emit, op: ops_core.GatherRows, x: tuple[str, ...]) -> str:
    return e.result("Gather", *x, axis=0)


@writes(ops_nn.Embed)
def embed(e: Emit, op: ops_nn.Embed, x: tuple[str, ...]) -> str:
    tokens, table = x
    if op.scale == 1.0:
        return e.result("Gather", table, tokens, axis=0)
    return e.result("Mul", e.op("Gather", table, tokens, axis=0), e.constant(op.scale, np.float32))


@writes(ops_nn.Linear)
def linear(e: Emit, op: ops_nn.Linear, x: tuple[str, ...]) -> str:
    turned = e.op("Transpose", x[1], perm=[1, 0])
    if len(x) == 2:
        return e.result("MatMul", x[0], turned)
    return e.result("Add", e.op("MatMul", x[0], turned), x[2])


@writes(ops_nn.RmsNorm)
def rms_norm(e: Emit, op: ops_nn.RmsNorm, x: tuple[str, ...]) -> str:
    mean = e.op("ReduceMean", e.op("Mul", x[0], x[0]), e.sizes(-1), keepdims=1)
    root = e.op("Sqrt", e.op("Add", mean, e.constant(op.eps, np.float32)))
    weight = e.op("Add", x[1], e.constant(op.offset, np.float32)) if op.offset else x[1]
    return e.result("Mul", e.op("Div", x[0], root), weight)


@writes(ops_nn.RopeTable)
def rope_table(e: Emit, op: ops_nn.RopeTable, x: tuple[str, ...]) -> str:
    positions = e.op("Unsqueeze", e.op("Cast", x[0], to=ELEMENTS[DType.F32]), e.sizes(1))
    angles = e.op("Unsqueeze", e.op("Mul", positions, x[1]), e.sizes(1))
    table = e.op("Concat", e.op("Cos", angles), e.op("Sin", angles), axis=1)
    return e.result("Mul", table, e.constant(op.scaling, np.float32))


@writes(ops_nn.Rope)
def rope(e: Emit, op: ops_nn.Rope, x: tuple[str, ...]) -> str:
    value, table = x
    half, dim = e.static(table, 2), e.static(value, 2)
    cos, sin = e.slice(table, 1, 0, 1), e.slice(table, 1, 1, 2)
    low, high = e.slice(value, 2, 0, half), e.slice(value, 2, half, 2 * half)
    parts = [e.op("Sub", e.op("Mul", low, cos), e.op("Mul", high, sin)), e.op("Add", e.op("Mul", high, cos), e.op("Mul", low, sin))]
    if 2 * half < dim:
        parts.append(e.slice(value, 2, 2 * half, dim))
    return e.result("Concat", *parts, axis=2)


@writes(ops_nn.Attention)
def attention(e: Emit, op: ops_nn.Attention, x: tuple[str, ...]) -> str:
    heads, kv_heads, dim = e.static(x[0], 1), e.static(x[1], 1), e.static(x[0], 2)
    q, k, v = (e.op("Transpose", value, perm=[1, 0, 2]) for value in x)
    k, v = (_grouped(e, value, kv_heads, heads // kv_heads, dim) for value in (k, v))
    scores = e.op("Mul", e.op("MatMul", q, e.op("Transpose", k, perm=[0, 2, 1])), e.constant(op.scale, np.float32))
    if op.softcap:
        cap = e.constant(op.softcap, np.float32)
        scores = e.op("Mul", e.op("Tanh", e.op("Div", scores, cap)), cap)
    seen = _seen(e, _size(e, x[0], 0), op.window)
    probabilities = e.op("Softmax", e.op("Where", seen, scores, e.constant(-np.inf, np.float32)), axis=-1)
    return e.result("Transpose", e.op("MatMul", probabilities, v), perm=[1, 0, 2])


def _grouped(e: Emit, value: str, heads: int, group: int, dim: int) -> str:
    """[heads, rows, dim] with each head `group` times."""
    if group == 1:
        return value
    apart = e.op("Expand", e.op("Unsqueeze", value, e.sizes(1)), e.sizes(1, group, 1, 1))
    return e.op("Reshape", apart, e.sizes(heads * group, -1, dim))


def _size(e: Emit, value: str, axis: int) -> str:
    """One size of a value, as an i64 scalar."""
    return e.op("Squeeze", e.op("Shape", value, start=axis, end=axis + 1), e.sizes(0))


def _seen(e: Emit, size: str, window: int, out: str | None = None) -> str:
    """bool[size, size]: p - window < j <= p."""
    positions = e.op("Range", e.constant(0, np.int64), size, e.constant(1, np.int64))
    distance = e.op("Sub", e.op("Unsqueeze", positions, e.sizes(1)), e.op("Unsqueeze", positions, e.sizes(0)))
    if not window:
        return e.op("GreaterOrEqual", distance, e.constant(0, np.int64), out=out)
    back = e.op("GreaterOrEqual", distance, e.constant(0, np.int64))
    return e.op("And", back, e.op("Less", distance, e.constant(window, np.int64)), out=out)


@writes(ops_capture.Positions)
def positions(e: Emit, op: ops_capture.Positions, x: tuple[str, ...]) -> str:
    counted = e.op("Range", e.constant(0, np.int64), _size(e, x[0], 1), e.constant(1, np.int64))
    return e.result("Cast", counted, to=ELEMENTS[DType.I32])


@writes(ops_capture.CausalMask)
def causal_mask(e: Emit, op: ops_capture.CausalMask, x: tuple[str, ...]) -> str:
    if not op.additive:
        return _seen(e, _size(e, x[0], 1), op.window, e.node.name)
    seen = _seen(e, _size(e, x[0], 1), op.window)
    return e.result("Where", seen, e.constant(0, np.float32), e.constant(LOWEST, np.float32))


@writes(ops_capture.Sdpa)
def sdpa(e: Emit, op: ops_capture.Sdpa, x: tuple[str, ...]) -> str:
    """[1, heads, seq, dim] as attention's [heads, seq, dim]."""
    heads, kv_heads, dim = e.static(x[0], 1), e.static(x[1], 1), e.static(x[0], 3)
    q, k, v = (e.op("Squeeze", value, e.sizes(0)) for value in x[:3])
    k, v = (_grouped(e, value, kv_heads, heads // kv_heads, dim) for value in (k, v))
    scores = e.op("Mul", e.op("MatMul", q, e.op("Transpose", k, perm=[0, 2, 1])), e.constant(op.scale, np.float32))
    if len(x) == 4 and e.type(x[3]).dtype is DType.F32:
        scores = e.op("Add", scores, x[3])
    elif len(x) == 4 or op.causal:
        seen = x[3] if len(x) == 4 else _seen(e, _size(e, x[0], 2), 0)
        scores = e.op("Where", seen, scores, e.constant(-np.inf, np.float32))
    return e.result("Unsqueeze", e.op("MatMul", e.op("Softmax", scores, axis=-1), v), e.sizes(0))


@writes(ops_moe.TopIndex)
def top_index(e: Emit, op: ops_moe.TopIndex, x: tuple[str, ...]) -> str:
    return e.result("Cast", e.second("TopK", *x, e.sizes(op.k), axis=-1), to=ELEMENTS[DType.I32])


@writes(ops_moe.Take)
def take(e: Emit, op: ops_moe.Take, x: tuple[str, ...]) -> str:
    return e.result("GatherElements", *x, axis=1)


@writes(ops_moe.ExpertLinear)
def expert_linear(e: Emit, op: ops_moe.ExpertLinear, x: tuple[str, ...]) -> str:
    """Each slot multiplies by its own copy of an expert's matrix: for looking and comparing, not for speed."""
    value, weight, index, *bias = x
    columns = e.static(weight, 1)
    turned = e.op("Transpose", e.op("Reshape", weight, e.sizes(op.experts, -1, columns)), perm=[0, 2, 1])
    product = e.op("MatMul", e.op("Unsqueeze", value, e.sizes(2)), e.op("Gather", turned, index, axis=0))
    if not bias:
        return e.result("Squeeze", product, e.sizes(2))
    return e.result("Add", e.op("Squeeze", product, e.sizes(2)), e.op("Gather", bias[0], index, axis=0))
