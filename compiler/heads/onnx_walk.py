"""What readers of heads in ONNX files share: walking a converted graph from outputs back to inputs, one expected op after the other.

Names of tensors do not matter: exporters change them (a matrix that is turned when the file is made gets a number for a name).
"""

from __future__ import annotations

from mlsdc.compiler.capture.onnx_graph import OnnxGraph
from mlsdc.compiler.errors import HeadError
from mlsdc.compiler.graph import Weight
from mlsdc.compiler.ops_core import Binary, Reduce, Reshape, Scalar, Unary
from mlsdc.compiler.ops_nn import Linear, RmsNorm


class Walk:
    """Reads a converted graph backwards. `meant` ends the sentence of an error: what the whole should have been."""

    meant = ""

    def __init__(self, label: str, graph: OnnxGraph) -> None:
        self.label, self.graph = label, graph

    def linear(self, value: str, wanted: str) -> tuple[str, tuple[str, ...]]:
        """Its input and its tensors: the matrix, maybe a bias."""
        value = self.unshaped(value)
        if not isinstance(self.graph.op(value), Linear):
            raise self.refused(value, wanted)
        x, *weights = self.graph.inputs(value)
        return x, tuple(self.tensor(weight) for weight in weights)

    def norm(self, value: str, wanted: str) -> tuple[str, str, float]:
        """x / sqrt(mean(x^2) + eps) * w: x, the tensor of w, eps."""
        value = self.unshaped(value)
        op = self.graph.op(value)
        if isinstance(op, RmsNorm) and op.offset == 0:
            x, weight = self.graph.inputs(value)
            return x, self.tensor(weight), op.eps
        if op == Binary("mul"):
            for weight, normed in self.either(value):
                if isinstance(self.graph.op(weight), Weight) and (found := self.normed(self.unshaped(normed))):
                    return found[0], self.tensor(weight), found[1]
        raise self.refused(value, f"{wanted}, x / sqrt(mean(x^2) + eps) * w")

    def normed(self, value: str) -> tuple[str, float] | None:
        """x / sqrt(mean(x^2) + eps): x and eps."""
        op = self.graph.op(value)
        if op not in (Binary("mul"), Binary("div")):
            return None
        root, pairs = ("rsqrt", self.either(value)) if op == Binary("mul") else ("sqrt", (self.graph.inputs(value),))
        for x, below in pairs:
            if self.graph.op(below) != Unary(root):
                continue
            (total,) = self.graph.inputs(below)
            plus = self.graph.op(total)
            if isinstance(plus, Scalar) and plus.fn == "add" and self.is_mean_square(self.graph.inputs(total)[0], x):
                return x, plus.value
        return None

    def is_mean_square(self, value: str, x: str) -> bool:
        """Whether `value` = mean(x^2) over the last axis."""
        mean, last = self.graph.op(value), len(self.graph.shape(value)) - 1
        if not isinstance(mean, Reduce) or mean.fn != "mean" or mean.axis % (last + 1) != last:
            return False
        (square,) = self.graph.inputs(value)
        if self.graph.op(square) not in (Scalar("pow", 2.0), Binary("mul")):
            return False
        return all(self.unshaped(factor) == self.unshaped(x) for factor in self.graph.inputs(square))

    def either(self, value: str) -> tuple[tuple[str, ...], ...]:
        """The inputs of an op of two, in both orders."""
        inputs = self.graph.inputs(value)
        return (inputs, inputs[::-1])

    def tensor(self, value: str) -> str:
        op = self.graph.op(value)
        if not isinstance(op, Weight):
            raise self.refused(value, "a tensor of the file")
        return op.sources[0]

    def unshaped(self, value: str) -> str:
        """Without reshapes that keep the last axis."""
        while isinstance(self.graph.op(value), Reshape):
            (inner,) = self.graph.inputs(value)
            if self.graph.shape(inner)[-1] != self.graph.shape(value)[-1]:
                break
            value = inner
        return value

    def refused(self, value: str, wanted: str) -> HeadError:
        return HeadError(f"{self.label}: '{value}' is made by {self.graph.op(value).opname}, expected {wanted}; {self.meant}")
