"""ATen -> core ops: one rule a function, found by the ATen overload's name. A rule gets the conversion and the node's arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import fx

from mlsdc.compiler.errors import CaptureError
from mlsdc.compiler.ops import Op
from mlsdc.compiler.ops_capture import CausalMask, Sdpa
from mlsdc.compiler.ops_core import Binary, Cast, Cat, Expand, MatMul, Reduce, Reshape, Scalar, Slice, Softmax, Transpose, Unary
from mlsdc.compiler.ops_moe import ExpertLinear, Take, TopIndex
from mlsdc.compiler.ops_nn import Embed, Linear, RmsNorm
from mlsdc.compiler.types import DType

DTYPES = {
    torch.float32: DType.F32, torch.float16: DType.F16, torch.bfloat16: DType.BF16, torch.int8: DType.I8, torch.uint8: DType.U8,
    torch.int32: DType.I32, torch.int64: DType.I64, torch.bool: DType.BOOL,
}  # fmt: skip


class Emit(Protocol):
    """What a rule may do. Values are IR names (str); numbers stay numbers."""

    node: fx.Node

    def add(self, op: Op, *inputs: str) -> str:
        """Append a node named after the FX node being converted."""

    def shape(self, value: str) -> tuple[int, ...]:
        """Static sizes, -1 for the sequence."""

    def target_shape(self) -> tuple[int, ...]:
        """The FX node's own shape, -1 for the sequence."""

    def dtype(self, value: str) -> DType: ...

    def mask_node(self, mask: CausalMask) -> str:
        """The one node of the graph that makes this mask."""

    def expert_rows(self, value: str) -> tuple[str, int]:
        """A tensor [experts, n, k] of the checkpoint, or a turned one, as the weight [experts n, k]; and experts."""


@dataclass(frozen=True)
class Nothing:
    """A tensor without elements: what is left of a head when RoPE turns all of it. Concatenation drops it, no other rule takes it."""


NOTHING = Nothing()
Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
R = TypeVar("R", bound=Rule)


def aten(*names: str) -> Callable[[R], R]:
    def register(rule: R) -> R:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def overload(node: fx.Node) -> str:
    """`aten.mul.Tensor` -> `mul.Tensor`; other callables by their name."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removeprefix("aten.")
    return str(getattr(node.target, "__name__", node.target))


UNARY = ("neg", "exp", "rsqrt", "sqrt", "cos", "sin", "tanh", "silu", "sigmoid", "abs")
for _fn in UNARY:
    RULES[f"{_fn}.default"] = lambda e, x, _fn=_fn: e.add(Unary(_fn), x)


@aten("gelu.default")
def gelu(e: Emit, x: str, approximate: str = "none") -> str:
    return e.add(Unary("gelu_tanh" if approximate == "tanh" else "gelu"), x)


def binary(e: Emit, fn: str, a: str | float, b: str | float) -> str | float:
    """`fn(a, b)`; constants that change nothing disappear."""
    if isinstance(a, str) and isinstance(b, str):
        return e.add(Binary(fn), a, b)
    if isinstance(b, str):
        return _number_first(e, fn, float(a), b)
    if not isinstance(a, str):
        raise CaptureError(f"{e.node.name}: {fn} of two numbers")
    if (fn, float(b)) in (("mul", 1.0), ("div", 1.0), ("add", 0.0), ("sub", 0.0), ("pow", 1.0)):
        return a
    return e.add(Scalar(fn, float(b)), a)


def _number_first(e: Emit, fn: str, a: float, b: str) -> str | float:
    if fn in ("add", "mul"):
        return binary(e, fn, b, a)
    if fn == "sub":
        return binary(e, "add", e.add(Unary("neg"), b), a)
    if fn == "div":
        return binary(e, "mul", e.add(Scalar("pow", -1.0), b), a)
    raise CaptureError(f"{e.node.name}: {fn} with a number on the left cannot be captured")


@aten("mul.Tensor", "mul.Scalar")
def mul(e: Emit, a: Any, b: Any) -> Any:
    return binary(e, "mul", a, b)


@aten("div.Tensor", "div.Scalar")
def div(e: Emit, a: Any, b: Any) -> Any:
    return binary(e, "div", a, b)


@aten("add.Tensor", "add.Scalar")
def add(e: Emit, a: Any, b: Any, alpha: float = 1) -> Any:
    return binary(e, "add", a, b if alpha == 1 else binary(e, "mul", b, alpha))


@aten("sub.Tensor", "sub.Scalar")
def sub(e: Emit, a: Any, b: Any, alpha: float = 1) -> Any:
    return binary(e, "sub", a, b if alpha == 1 else binary(e, "mul", b, alpha))


@aten("rsub.Scalar", "rsub.Tensor")
def rsub(e: Emit, a: Any, b: Any, alpha: float = 1) -> Any:
    return sub(e, b, a, alpha)


@aten("pow.Tensor_Scalar")
def power(e: Emit, a: Any, b: Any) -> Any:
    return binary(e, "pow", a, b)


@aten("square.default")
def square(e: Emit, a: str) -> str:
    return e.add(Scalar("pow", 2.0), a)


@aten("reciprocal.default")
def reciprocal(e: Emit, a: str) -> str:
    return e.add(Scalar("pow", -1.0), a)


@aten("mean.dim")
def mean(e: Emit, x: str, dim: list[int], keepdim: bool = False, dtype: torch.dtype | None = None) -> str:
    return _reduce(e, "mean", x, dim, keepdim)


@aten("sum.dim_IntList")
def total(e: Emit, x: str, dim: list[int], keepdim: bool = False, dtype: torch.dtype | None = None) -> str:
    return _reduce(e, "sum", x, dim, keepdim)


def _reduce(e: Emit, fn: str, x: str, dim: list[int], keepdim: bool) -> str:
    for axis in dim:
        x = e.add(Reduce(fn, axis), x)
    return x if keepdim else e.add(Reshape(e.target_shape()), x)


@aten("to.dtype", "to.dtype_layout", "to.device", "_to_copy.default", "type_as.default", "to.other")
def to(e: Emit, x: str, *_: Any, **__: Any) -> str:
    wanted = DTYPES[e.node.meta["val"].dtype]
    return x if e.dtype(x) == wanted else e.add(Cast(wanted), x)


@aten(
    "contiguous.default", "alias.default", "clone.default", "detach.default", "detach_.default",
    "dropout.default", "lift_fresh_copy.default",
)  # fmt: skip
def same(e: Emit, x: str, *_: Any, **__: Any) -> str:
    return x


@aten(
    "view.default", "reshape.default", "_unsafe_view.default", "unsqueeze.default", "squeeze.dim", "squeeze.dims", "flatten.using_ints",
    "unflatten.int",
)  # fmt: skip
def reshape(e: Emit, x: str, *_: Any) -> str:
    return x if e.shape(x) == e.target_shape() else e.add(Reshape(e.target_shape()), x)


@aten("expand.default")
def expand(e: Emit, x: str, *_: Any, **__: Any) -> str:
    if e.shape(x) == e.target_shape():
        return x
    have, want = e.shape(x), e.target_shape()
    have = (1,) * (len(want) - len(have)) + have
    return e.add(Expand(tuple(-1 if h == w else w for h, w in zip(have, want, strict=True))), x)


@aten("transpose.int")
def transpose(e: Emit, x: str, a: int, b: int) -> str:
    return e.add(Transpose(a, b), x)


@aten("t.default", "numpy_T.default", "mT.default")
def flip(e: Emit, x: str) -> str:
    return e.add(Transpose(-2, -1), x)


@aten("permute.default")
def permute(e: Emit, x: str, dims: list[int]) -> str:
    moved = [i for i, d in enumerate(dims) if d % len(dims) != i]
    if not moved:
        return x
    if len(moved) != 2:
        raise CaptureError(f"{e.node.name}: permute{dims} moves {len(moved)} axes; only swaps of two can be captured")
    return e.add(Transpose(*moved), x)


@aten("slice.Tensor")
def slice_(e: Emit, x: str, dim: int = 0, start: int | None = 0, end: int | None = None, step: int = 1) -> str | Nothing:
    size = e.shape(x)[dim]
    if size == -1 and e.target_shape() == e.shape(x):
        return x  # x[:, :seq]
    if size == -1 or step != 1:
        raise CaptureError(f"{e.node.name}: a slice of the sequence axis, or one with step {step}, cannot be captured")
    low, high, _ = slice(start, end).indices(size)
    if low >= high:
        return NOTHING
    return x if (low, high) == (0, size) else e.add(Slice(dim, low, high), x)


@aten("select.int")
def select(e: Emit, x: str, dim: int, index: int) -> str:
    size = e.shape(x)[dim]
    if size == -1:
        raise CaptureError(f"{e.node.name}: one position of the sequence axis cannot be captured")
    return e.add(Reshape(e.target_shape()), e.add(Slice(dim, index % size, index % size + 1), x))


@aten("split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default")
def split(e: Emit, x: str, sizes: int | list[int], dim: int = 0) -> list[str]:
    parts, start = [], 0
    for part in e.node.meta["val"]:
        size = int(part.shape[dim])
        parts.append(e.add(Slice(dim, start, start + size), x))
        start += size
    return parts


@aten("getitem")
def getitem(e: Emit, values: list[str], index: int) -> str:
    return values[index]


@aten("cat.default")
def cat(e: Emit, values: list[str | Nothing], dim: int = 0) -> str:
    parts = [value for value in values if not isinstance(value, Nothing)]
    return parts[0] if len(parts) == 1 else e.add(Cat(dim), *parts)


@aten("repeat_interleave.self_int")
def repeat_interleave(e: Emit, x: str, repeats: int, dim: int, **_: Any) -> str:
    shape = e.shape(x)
    dim %= len(shape)
    apart = e.add(Reshape((*shape[: dim + 1], 1, *shape[dim + 1 :])), x)
    wide = e.add(Expand((*(-1,) * (dim + 1), repeats, *(-1,) * (len(shape) - dim - 1))), apart)
    return e.add(Reshape(e.target_shape()), wide)


@aten("matmul.default", "bmm.default", "mm.default")
def matmul(e: Emit, a: str, b: str) -> str:
    return e.add(MatMul(), a, b)


@aten("outer.default")
def outer(e: Emit, a: str, b: str) -> str:
    return e.add(Binary("mul"), e.add(Reshape((*e.shape(a), 1)), a), b)


@aten("linear.default")
def linear(e: Emit, x: str, weight: str, bias: str | None = None) -> str:
    return e.add(Linear(), x, weight, *([bias] if bias else []))


@aten("div_.Tensor", "mul_.Tensor", "add_.Tensor")
def in_place(e: Emit, a: str, b: Any) -> Any:
    """The new value under the old one's place; the old one must not be read later."""
    changed = e.node.args[0]
    assert isinstance(changed, fx.Node)
    later = list(changed.users)
    if any(user is not e.node for user in later[later.index(e.node) :]):
        raise CaptureError(f"{e.node.name}: changes '{changed.name}' in place, which is read later")
    return binary(e, overload(e.node).partition("_")[0], a, b)


@aten("layer_norm.default")
def layer_norm(
    e: Emit, x: str, shape: list[int], weight: str | None = None, bias: str | None = None, eps: float = 1e-5, *_: Any
) -> str | float:
    """x - mean(x), which rms_norm then scales."""
    if weight is None or len(shape) != 1:
        raise CaptureError(f"{e.node.name}: layer_norm without a weight, or over several axes, cannot be captured")
    centred = e.add(Binary("sub"), x, e.add(Reduce("mean", -1), x))
    normed = e.add(RmsNorm(eps), centred, weight)
    return normed if bias is None else e.add(Binary("add"), normed, bias)


@aten("clamp.default")
def clamp(e: Emit, x: str, low: float | None = None, high: float | None = None) -> str:
    x = x if low is None else e.add(Scalar("maximum", float(low)), x)
    return x if high is None else e.add(Scalar("minimum", float(high)), x)


@aten("norm.ScalarOpt_dim", "linalg_vector_norm.default")
def norm(e: Emit, x: str, order: float = 2, dim: list[int] | None = None, keepdim: bool = False, **_: Any) -> str:
    if order not in (1, 2) or dim is None or len(dim) != 1:
        raise CaptureError(f"{e.node.name}: a norm of order {order} over axes {dim} cannot be captured; orders 1 and 2 of one axis can")
    if order == 1:
        return _reduce(e, "sum", e.add(Unary("abs"), x), dim, keepdim)
    return e.add(Unary("sqrt"), _reduce(e, "sum", e.add(Scalar("pow", 2.0), x), dim, keepdim))


@aten("topk.default")
def top_k(e: Emit, x: str, k: int, dim: int = -1, largest: bool = True, sort: bool = True) -> list[str]:
    if dim % len(e.shape(x)) != len(e.shape(x)) - 1 or not largest or len(e.shape(x)) != 2:
        raise CaptureError(f"{e.node.name}: topk of {list(e.shape(x))} over axis {dim}; the largest of a matrix's rows can be captured")
    index = e.add(TopIndex(k), x)
    return [e.add(Take(), x, index), index]


@aten("mlsdc.expert_linear.default")
def expert_linear(e: Emit, x: str, weight: str, index: str, bias: str | None = None) -> str:
    """capture.experts' op: [experts, n, k] becomes [experts n, k]."""
    rows, experts = e.expert_rows(weight)
    return e.add(ExpertLinear(experts), x, rows, index, *([bias] if bias else []))


@aten("embedding.default")
def embedding(e: Emit, table: str, tokens: str, *_: Any, **__: Any) -> str:
    return e.add(Embed(), tokens, table)


@aten("rms_norm.default")
def rms_norm(e: Emit, x: str, shape: list[int], weight: str | None = None, eps: float | None = None) -> str:
    if weight is None or len(shape) != 1:
        raise CaptureError(f"{e.node.name}: rms_norm without a weight, or over several axes, cannot be captured")
    return e.add(RmsNorm(torch.finfo(torch.float32).eps if eps is None else eps), x, weight)


@aten("softmax.int", "_softmax.default", "special_softmax.int")
def softmax(e: Emit, x: str, dim: int, *_: Any, **__: Any) -> str:
    if dim % len(e.shape(x)) != len(e.shape(x)) - 1:
        raise CaptureError(f"{e.node.name}: softmax over axis {dim}; only the last axis can be captured")
    return e.add(Softmax(), x)


@aten("scaled_dot_product_attention.default")
def sdpa(
    e: Emit, q: str, k: str, v: str, attn_mask: str | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> str:  # fmt: skip
    scale = 1.0 / math.sqrt(e.shape(q)[-1]) if scale is None else scale
    return e.add(Sdpa(scale, is_causal), q, k, v, *([attn_mask] if attn_mask else []))


@aten("masked_fill.Scalar")
def masked_fill(e: Emit, x: str, hidden: CausalMask | str, value: float) -> str:
    """Scores filled with a very low number where a mask hides: the same as adding an additive mask."""
    if not isinstance(hidden, CausalMask) or value > -1e4:
        raise CaptureError(f"{e.node.name}: masked_fill is captured for causal masks and very low values only")
    return e.add(Binary("add"), x, e.mask_node(hidden))
