"""ONNX operators -> core ops: one rule a function, found by domain and operator. A rule gets the conversion, the node, its attributes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import onnx

from mlsdc.compiler.capture.onnx_known import LENGTHS
from mlsdc.compiler.errors import CaptureError
from mlsdc.compiler.ops_capture import CausalMask
from mlsdc.compiler.ops_core import Binary, Cast, Cat, Expand, MatMul, Reduce, Reshape, Scalar, Slice, Softmax, Transpose, Unary
from mlsdc.compiler.ops_nn import Embed, Linear, RmsNorm
from mlsdc.compiler.types import DType

if TYPE_CHECKING:
    from mlsdc.compiler.capture.onnx_graph import OnnxGraph


@dataclass(frozen=True)
class Empty:
    """A tensor without elements: the past of a sequence that has none. Concatenation drops it, no other rule takes it."""


@dataclass(frozen=True)
class WasNan:
    """IsNaN of a value: exporters guard softmax with it; a causal row always sees itself."""

    of: str


EMPTY = Empty()
Rule = Callable[["OnnxGraph", onnx.NodeProto, Mapping[str, Any]], Any]
RULES: dict[str, Rule] = {}
R = TypeVar("R", bound=Rule)


def reads(*kinds: str) -> Callable[[R], R]:
    def register(rule: R) -> R:
        RULES.update(dict.fromkeys(kinds, rule))
        return rule

    return register


def key(node: onnx.NodeProto) -> str:
    """`MatMul`, `com.microsoft.MatMulNBits`."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


UNARY = {"Neg": "neg", "Exp": "exp", "Sqrt": "sqrt", "Cos": "cos", "Sin": "sin", "Tanh": "tanh", "Sigmoid": "sigmoid", "Abs": "abs"}
BINARY = {"Mul": "mul", "Add": "add", "Sub": "sub", "Div": "div", "Pow": "pow", "Max": "maximum", "Min": "minimum"}


@reads(*UNARY)
def unary(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    return c.add(Unary(UNARY[node.op_type]), c.value(node.input[0]))


@reads("Reciprocal")
def reciprocal(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    x = c.value(node.input[0])
    return c.add(Unary("rsqrt"), *c.inputs(x)) if c.op(x) == Unary("sqrt") else c.add(Scalar("pow", -1.0), x)


@reads("Identity", "Dropout")
def identity(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> Any:
    return c.value(node.input[0])


@reads("Cast")
def cast(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    """Floats of every width are f32; whole numbers of every width are what they are."""
    x = c.value(node.input[0])
    to_float = facts["to"] in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)
    if to_float == (c.dtype(x) is DType.F32):
        return x  # type: ignore[no-any-return]
    if not to_float:
        raise CaptureError(f"{c.where(node)}: casts numbers that depend on the tokens to whole ones")
    return c.add(Cast(DType.F32), x)


@reads(*BINARY)
def binary(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    fn, (left, right) = BINARY[node.op_type], node.input
    a, b = c.number(left), c.number(right)
    if b is not None:
        x = c.value(left)
        return str(x) if (fn, b) in (("mul", 1.0), ("div", 1.0), ("add", 0.0), ("sub", 0.0), ("pow", 1.0)) else c.add(Scalar(fn, b), x)
    if a is not None:
        return number_first(c, fn, a, c.value(right))
    x, y = c.value(left), c.value(right)
    if fn == "mul":
        for value, gate in ((x, y), (y, x)):
            if c.op(gate) == Unary("sigmoid") and c.inputs(gate) == (value,):
                return c.add(Unary("silu"), value)
    if fn == "add":
        for value, bias in ((x, y), (y, x)):
            if isinstance(c.op(value), Linear) and len(c.inputs(value)) == 2 and is_bias(c, bias, c.shape(value)[-1]):
                return c.add(Linear(), *c.inputs(value), bias)
    return c.add(Binary(fn), x, y)


def number_first(c: OnnxGraph, fn: str, a: float, x: str) -> str:
    if fn in ("add", "mul", "maximum", "minimum"):
        return c.add(Scalar(fn, a), x)
    if fn == "sub":
        return c.add(Scalar("add", a), c.add(Unary("neg"), x))
    if fn == "div":
        return c.add(Scalar("mul", a), c.add(Scalar("pow", -1.0), x))
    raise CaptureError(f"{c.where(c.node)}: a number to the power of a tensor")


def is_bias(c: OnnxGraph, value: str, columns: int) -> bool:
    return value.startswith("w.") and c.shape(value) == (columns,)


@reads("Gather")
def gather(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    table, index = node.input
    if c.known.known(index) or not c.known.known(table) or facts.get("axis", 0) != 0:
        return gathered(c, node, facts)
    return c.add(Embed(), c.value(index), c.value(table))


def gathered(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    """One index of a static axis, or the last of the sequence."""
    x, index = c.value(node.input[0]), c.number(node.input[1])
    axis = facts.get("axis", 0) % len(c.shape(x))
    size = c.shape(x)[axis]
    indices = [c.known.at(node.input[1], n) for n in LENGTHS]
    if size == -1 and all(i.size == 1 and int(i.reshape(-1)[0]) in (-1, n - 1) for i, n in zip(indices, LENGTHS, strict=True)):
        return last_token(c, node, x, axis, indices[0].shape)
    if index is None or size == -1:
        raise CaptureError(f"{c.where(node)}: only rows of a table by token, one index of a static axis, or the last token can be read")
    part = c.add(Slice(axis, int(index) % size, int(index) % size + 1), x)
    shape = list(c.shape(x))
    return c.add(Reshape(tuple(shape[:axis] + list(c.known.at(node.input[1], LENGTHS[0]).shape) + shape[axis + 1 :])), part)


def last_token(c: OnnxGraph, node: onnx.NodeProto, x: str, axis: int, index: tuple[int, ...]) -> str:
    """The file takes the last of the sequence on `axis`. That position then is an axis of 1; the batch's where the index is a number."""
    shape = [*c.shape(x)[:axis], *index, *c.shape(x)[axis + 1 :]]
    stands = axis if index else axis - 1
    if stands < 0 or shape[stands] != 1:
        raise CaptureError(f"{c.where(node)}: takes the last token, and nothing of its result {shape} can stand for the sequence")
    shape[stands] = -1
    return str(c.only_last(x, tuple(shape)))


@reads("MatMul")
def matmul(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    weight = c.rows(node.input[1]) if c.known.known(node.input[1]) else None
    x = c.value(node.input[0])
    return c.add(MatMul(), x, c.value(node.input[1])) if weight is None else c.add(Linear(), x, weight)


@reads("Gemm")
def gemm(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    if facts.get("alpha", 1.0) != 1.0 or facts.get("beta", 1.0) != 1.0 or facts.get("transA", 0):
        raise CaptureError(f"{c.where(node)}: only x @ W + b can be read")
    name = node.input[1]
    weight = c.value(name) if facts.get("transB", 0) else c.rows(name)
    if weight is None:
        raise CaptureError(f"{c.where(node)}: multiplies by no weight")
    bias = [c.value(node.input[2])] if len(node.input) > 2 and node.input[2] else []
    return c.add(Linear(), c.value(node.input[0]), weight, *bias)


@reads("Reshape")
def reshape(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    x = c.value(node.input[0])
    shapes = []
    for length in LENGTHS:
        have, want = c.shape_at(x, length), c.known.at(node.input[1], length).tolist()
        sizes = [have[i] if size == 0 and not facts.get("allowzero", 0) else size for i, size in enumerate(want)]
        rest = math.prod(have) // max(1, math.prod(size for size in sizes if size != -1))
        shapes.append(tuple(rest if size == -1 else int(size) for size in sizes))
    return merged_transpose(c, c.reshaped(x, shapes))


def merged_transpose(c: OnnxGraph, value: str) -> str:
    """[1, h, s, d] -> [h, s, d] -> [h, d, s] -> [1, h, d, s] is one transpose."""
    made = c.op(value)
    if not isinstance(made, Reshape) or len(c.shape(value)) != 4:
        return value
    (turned,) = c.inputs(value)
    if not isinstance(c.op(turned), Transpose) or len(c.shape(turned)) != 3:
        return value
    (flat,) = c.inputs(turned)
    if c.shape(value) != (1, *c.shape(turned)) or not isinstance(c.op(flat), Reshape):
        return value
    (x,) = c.inputs(flat)
    swap = c.op(turned)
    if c.shape(x) != (1, *c.shape(flat)) or not isinstance(swap, Transpose) or {swap.a % 3, swap.b % 3} != {1, 2}:
        return value
    return c.add(Transpose(2, 3), x)


@reads("Unsqueeze", "Squeeze", "Flatten")
def resized(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    x = c.value(node.input[0])
    axes = facts.get("axes") if len(node.input) < 2 else c.ints(node.input[1])
    shapes = []
    for length in LENGTHS:
        like = np.broadcast_to(np.zeros((), np.bool_), c.shape_at(x, length))
        if node.op_type == "Flatten":
            axis = facts.get("axis", 1)
            like = np.empty((math.prod(like.shape[:axis]), math.prod(like.shape[axis:])), np.bool_)
        elif node.op_type == "Unsqueeze":
            like = np.expand_dims(like, tuple(axes or ()))
        else:
            like = np.squeeze(like, tuple(axes) if axes else None)
        shapes.append(like.shape)
    return c.reshaped(x, shapes)


@reads("Expand")
def expand(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    x = c.value(node.input[0])
    shapes = [np.broadcast_shapes(c.shape_at(x, n), tuple(c.known.at(node.input[1], n).tolist())) for n in LENGTHS]
    wanted = tuple(-1 if (a, b) == LENGTHS else a for a, b in zip(*shapes, strict=True))
    if wanted == c.shape(x):
        return x  # type: ignore[no-any-return]
    have = (1,) * (len(wanted) - len(c.shape(x))) + c.shape(x)
    return c.add(Expand(tuple(-1 if h == w else w for h, w in zip(have, wanted, strict=True))), x)


@reads("Transpose")
def transpose(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    x = c.value(node.input[0])
    order = list(facts.get("perm", range(len(c.shape(x)))[::-1]))
    now = list(range(len(order)))
    for axis, wanted in enumerate(order):  # swaps of two, which is what the IR has
        at = now.index(wanted)
        if at != axis:
            now[axis], now[at] = now[at], now[axis]
            x = c.add(Transpose(axis, at), x)
    return x  # type: ignore[no-any-return]


@reads("Slice")
def slice_(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    """Static ranges of static axes, or the last of the sequence."""
    x = c.value(node.input[0])
    starts, ends = ([c.known.at(node.input[i], n).tolist() for n in LENGTHS] for i in (1, 2))
    axes = c.known.at(node.input[3], LENGTHS[0]).tolist() if len(node.input) > 3 and node.input[3] else list(range(len(starts[0])))
    steps = c.known.at(node.input[4], LENGTHS[0]).tolist() if len(node.input) > 4 and node.input[4] else [1] * len(axes)
    for i, (axis, step) in enumerate(zip(axes, steps, strict=True)):
        axis %= len(c.shape(x))
        size = c.shape(x)[axis]
        ranges = [slice(starts[at][i], ends[at][i]).indices(n if size == -1 else size)[:2] for at, n in enumerate(LENGTHS)]
        if size == -1 and step == 1 and all(found == (n - 1, n) for found, n in zip(ranges, LENGTHS, strict=True)):
            x = last_token(c, node, x, axis, (1,))
        elif size == -1 and (step != 1 or any(found != (0, n) for found, n in zip(ranges, LENGTHS, strict=True))):
            raise CaptureError(f"{c.where(node)}: a slice of the sequence axis that is neither all of it nor the last token")
        elif step != 1 or ranges[0] != ranges[1]:
            raise CaptureError(f"{c.where(node)}: a slice with step {step} or bounds that vary with the length")
        elif size != -1 and ranges[0] != (0, size):
            x = c.add(Slice(axis, *ranges[0]), x)
    return str(x)


@reads("Split")
def split(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> list[str]:
    x = c.value(node.input[0])
    axis = facts.get("axis", 0) % len(c.shape(x))
    size, count = c.shape(x)[axis], len(node.output)
    sizes = c.ints(node.input[1]) if len(node.input) > 1 and node.input[1] else (-(-size // count),) * count
    parts, start = [], 0
    for part in sizes:
        end = min(size, start + part)
        parts.append(c.add(Slice(axis, start, end), x))
        start = end
    return parts


@reads("Concat")
def concat(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> Any:
    parts = [value for name in node.input if not isinstance(value := c.value(name), Empty)]
    return parts[0] if len(parts) == 1 else c.add(Cat(facts["axis"]), *parts)


@reads("ReduceMean", "ReduceSum", "ReduceMax")
def reduce(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    x = c.value(node.input[0])
    axes = c.ints(node.input[1]) if len(node.input) > 1 and node.input[1] else tuple(facts["axes"])
    fn = {"ReduceMean": "mean", "ReduceSum": "sum", "ReduceMax": "max"}[node.op_type]
    shape = [size for axis, size in enumerate(c.shape(x)) if axis not in [a % len(c.shape(x)) for a in axes]]
    for axis in axes:
        x = c.add(Reduce(fn, axis), x)
    return str(x) if facts.get("keepdims", 1) else c.add(Reshape(tuple(shape)), x)


@reads("Softmax")
def softmax(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    x = c.value(node.input[0])
    if facts.get("axis", -1) % len(c.shape(x)) != len(c.shape(x)) - 1:
        raise CaptureError(f"{c.where(node)}: softmax over axis {facts['axis']}; only the last axis can be read")
    return c.add(Softmax(), x)


@reads("IsNaN")
def is_nan(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> WasNan:
    return WasNan(c.value(node.input[0]))


@reads("Where")
def where(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> Any:
    """A guard against NaN, or scores where a mask allows them and a very low number elsewhere."""
    condition, yes, no = node.input
    if not c.known.known(condition):
        guard, value = c.value(condition), c.value(no)
        if isinstance(guard, WasNan) and guard.of == value:
            return value
        raise CaptureError(f"{c.where(node)}: chooses by what depends on the tokens")
    scores, other, hidden = (no, yes, True) if c.known.known(yes) else (yes, no, False)
    mask, low = c.known.mask(condition, hidden=hidden), c.number(other)
    if mask is None or low is None or low > -1e4:
        raise CaptureError(f"{c.where(node)}: chooses otherwise than by a causal mask between scores and a very low number")
    return c.add(Binary("add"), c.value(scores), c.mask(CausalMask(mask.window, additive=True)))


@reads("Clip")
def clip(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    x = c.value(node.input[0])
    bounds = [c.number(name) if name else None for name in [*node.input[1:], "", ""][:2]]
    for fn, bound in zip(("maximum", "minimum"), bounds, strict=True):
        x = x if bound is None else c.add(Scalar(fn, bound), x)
    return str(x)


@reads("Gelu", "com.microsoft.Gelu", "com.microsoft.FastGelu")
def gelu(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    tanh = facts.get("approximate") == "tanh" or node.op_type == "FastGelu"
    return c.add(Unary("gelu_tanh" if tanh else "gelu"), c.value(node.input[0]))


@reads("com.microsoft.QuickGelu")
def quick_gelu(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    """x sigmoid(alpha x): what onnxruntime makes of silu."""
    if facts.get("alpha", 1.702) != 1.0:
        raise CaptureError(f"{c.where(node)}: alpha {facts.get('alpha', 1.702)}; only 1, which is silu, can be read")
    return c.add(Unary("silu"), c.value(node.input[0]))


@reads("LayerNormalization")
def layer_norm(c: OnnxGraph, node: onnx.NodeProto, facts: Mapping[str, Any]) -> str:
    x = c.value(node.input[0])
    centred = c.add(Binary("sub"), x, c.add(Reduce("mean", -1), x))
    normed = c.add(RmsNorm(facts.get("epsilon", 1e-5)), centred, c.value(node.input[1]))
    return c.add(Binary("add"), normed, c.value(node.input[2])) if len(node.input) > 2 and node.input[2] else normed


from mlsdc.compiler.capture import onnx_fused  # noqa: E402, F401  (registers the fused operators; it needs what stands above)
