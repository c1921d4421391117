"""Plain tensor ops: what a capture produces before anything is raised. Shapes follow numpy's rules; dtypes must agree."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.compiler.ops import Mismatch, Op, expect_arity, expect_equal, expect_tensor, op
from mlsdc.compiler.types import DType, Size, TensorType, Type

UNARY = ("neg", "exp", "rsqrt", "sqrt", "cos", "sin", "tanh", "silu", "gelu", "gelu_tanh", "sigmoid", "abs")
BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum")


def broadcast(a: tuple[Size, ...], b: tuple[Size, ...]) -> tuple[Size, ...]:
    """numpy's broadcast of two shapes; a symbolic size matches itself and 1."""
    width = max(len(a), len(b))
    out: list[Size] = []
    for x, y in zip((1,) * (width - len(a)) + a, (1,) * (width - len(b)) + b, strict=True):
        if x != y and x != 1 and y != 1:
            raise Mismatch(f"cannot broadcast [{', '.join(map(str, a))}] with [{', '.join(map(str, b))}]")
        out.append(y if x == 1 else x)
    return tuple(out)


def axis_of(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise Mismatch(f"axis {axis} is outside rank {rank}")
    return axis % rank


@op("unary")
@dataclass(frozen=True)
class Unary(Op):
    """Elementwise `fn(x)`, fn one of UNARY. `gelu` is the erf form, `gelu_tanh` the tanh form."""

    fn: str

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        if self.fn not in UNARY:
            raise Mismatch(f"fn '{self.fn}' is not one of {', '.join(UNARY)}")
        return expect_tensor(inputs[0], "input")


@op("binary")
@dataclass(frozen=True)
class Binary(Op):
    """Elementwise `fn(a, b)` with broadcasting, fn one of BINARY."""

    fn: str

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2)
        if self.fn not in BINARY:
            raise Mismatch(f"fn '{self.fn}' is not one of {', '.join(BINARY)}")
        a, b = expect_tensor(inputs[0], "left"), expect_tensor(inputs[1], "right")
        expect_equal(b.dtype, a.dtype, "dtype of the right input")
        return a.with_shape(*broadcast(a.shape, b.shape))


@op("scalar")
@dataclass(frozen=True)
class Scalar(Op):
    """Elementwise `fn(x, value)` with a constant."""

    fn: str
    value: float

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        if self.fn not in BINARY:
            raise Mismatch(f"fn '{self.fn}' is not one of {', '.join(BINARY)}")
        return expect_tensor(inputs[0], "input")


@op("reduce")
@dataclass(frozen=True)
class Reduce(Op):
    """`fn` (mean, sum, max) over one axis, kept as size 1."""

    fn: str
    axis: int = -1

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        if self.fn not in ("mean", "sum", "max"):
            raise Mismatch(f"fn '{self.fn}' is not one of mean, sum, max")
        x = expect_tensor(inputs[0], "input")
        axis = axis_of(self.axis, x.rank)
        return x.with_shape(*x.shape[:axis], 1, *x.shape[axis + 1 :])


@op("cast")
@dataclass(frozen=True)
class Cast(Op):
    dtype: DType

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        return expect_tensor(inputs[0], "input").with_dtype(self.dtype)


@op("reshape")
@dataclass(frozen=True)
class Reshape(Op):
    """Same elements, other shape. -1 (at most once) stands for the one symbolic size, which must stay whole."""

    shape: tuple[int, ...]

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        x = expect_tensor(inputs[0], "input")
        symbolic = [s for s in x.shape if not isinstance(s, int)]
        known = 1
        for s in x.shape:
            known *= s if isinstance(s, int) else 1
        wanted = 1
        for s in self.shape:
            wanted *= s if s != -1 else 1
        if self.shape.count(-1) != len(symbolic) or len(symbolic) > 1 or known != wanted:
            raise Mismatch(f"cannot reshape {x} to {list(self.shape)}")
        return x.with_shape(*(symbolic[0] if s == -1 else s for s in self.shape))


@op("transpose")
@dataclass(frozen=True)
class Transpose(Op):
    """Swap two axes."""

    a: int
    b: int

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        x = expect_tensor(inputs[0], "input")
        a, b = axis_of(self.a, x.rank), axis_of(self.b, x.rank)
        shape = list(x.shape)
        shape[a], shape[b] = shape[b], shape[a]
        return x.with_shape(*shape)


@op("slice")
@dataclass(frozen=True)
class Slice(Op):
    """`x[..., start:end, ...]` along a static axis."""

    axis: int
    start: int
    end: int

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        x = expect_tensor(inputs[0], "input")
        axis = axis_of(self.axis, x.rank)
        size = x.shape[axis]
        if not isinstance(size, int) or not 0 <= self.start < self.end <= size:
            raise Mismatch(f"cannot slice {self.start}:{self.end} out of axis {axis} of {x}")
        return x.with_shape(*x.shape[:axis], self.end - self.start, *x.shape[axis + 1 :])


@op("cat")
@dataclass(frozen=True)
class Cat(Op):
    axis: int = -1

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1, 64)
        tensors = [expect_tensor(t, f"input {i}") for i, t in enumerate(inputs)]
        first = tensors[0]
        axis = axis_of(self.axis, first.rank)
        total = 0
        for t in tensors:
            expect_equal(t.dtype, first.dtype, "dtype of an input")
            expect_equal(t.shape[:axis] + t.shape[axis + 1 :], first.shape[:axis] + first.shape[axis + 1 :], "other axes of an input")
            size = t.shape[axis]
            if not isinstance(size, int):
                raise Mismatch(f"cannot concatenate along the symbolic axis {axis} of {t}")
            total += size
        return first.with_shape(*first.shape[:axis], total, *first.shape[axis + 1 :])


@op("expand")
@dataclass(frozen=True)
class Expand(Op):
    """Repeat axes of size 1 up to `shape`; -1 keeps an axis. Leading axes may be added."""

    shape: tuple[int, ...]

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        x = expect_tensor(inputs[0], "input")
        if len(self.shape) < x.rank:
            raise Mismatch(f"cannot expand {x} to {list(self.shape)}")
        padded: tuple[Size, ...] = (1,) * (len(self.shape) - x.rank) + x.shape
        out: list[Size] = []
        for have, want in zip(padded, self.shape, strict=True):
            if want not in (-1, have) and have != 1:
                raise Mismatch(f"cannot expand {x} to {list(self.shape)}")
            out.append(have if want == -1 else want)
        return x.with_shape(*out)


@op("matmul")
@dataclass(frozen=True)
class MatMul(Op):
    """Batched `a[..., m, k] @ b[..., k, n]`, batch axes broadcast."""

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2)
        a, b = expect_tensor(inputs[0], "left"), expect_tensor(inputs[1], "right")
        if a.rank < 2 or b.rank < 2 or a.shape[-1] != b.shape[-2]:
            raise Mismatch(f"cannot multiply {a} by {b}")
        expect_equal(b.dtype, a.dtype, "dtype of the right input")
        return a.with_shape(*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])


@op("softmax")
@dataclass(frozen=True)
class Softmax(Op):
    """Softmax over the last axis, in f32."""

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        return expect_tensor(inputs[0], "input", dtypes=(DType.F32,))


@op("argmax")
@dataclass(frozen=True)
class ArgMax(Op):
    """Index of the largest element of the last axis; ties go to the lowest index. `limit` > 0 looks at the first `limit` only
    (a padded vocabulary: padding ids are never chosen)."""

    limit: int = 0

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 1)
        x = expect_tensor(inputs[0], "input", dtypes=(DType.F32,))
        return TensorType(DType.I32, x.shape[:-1])


@op("gather_rows")
@dataclass(frozen=True)
class GatherRows(Op):
    """`x[index]`: rows of x[rows, n] picked by index i32[out] -> [out, n]. The rows that want logits."""

    def infer(self, *inputs: Type) -> Type:
        expect_arity(inputs, 2)
        x = expect_tensor(inputs[0], "input", rank=2)
        index = expect_tensor(inputs[1], "index", rank=1, dtypes=(DType.I32,))
        return x.with_shape(index.shape[0], x.shape[1])
