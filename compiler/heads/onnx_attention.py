"""The attention of an eagle's layer in an ONNX file: what lies between the linear `o` and three others, proven by evaluating it.

Exporters write rotation, grouped heads, masks and softmax in many ways. All of them must give the numbers of

    softmax(rope(q) rope(k)^T / sqrt(d), causal) v

for random q, k and v. So no form of it has to be recognised, and none that computes something else is taken.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.capture.source import WeightSource
from mlsdc.compiler.errors import HeadError, IrError
from mlsdc.compiler.graph import Builder, Input, Weight
from mlsdc.compiler.heads.onnx_walk import Walk
from mlsdc.compiler.ops_capture import CausalMask
from mlsdc.compiler.ops_core import Reshape
from mlsdc.compiler.ops_nn import Linear
from mlsdc.compiler.types import TensorType

Array = npt.NDArray[Any]
ROWS = 9
CLOSE = 1e-4  # of the largest value


@dataclass(frozen=True)
class Attended:
    """The linears that q, k and v come from, and what is done with them."""

    q: str
    k: str
    v: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float


class AttentionWalk(Walk):
    """Needs a graph whose token input is called `tokens`."""

    def attention(self, value: str, weights: WeightSource) -> Attended:
        """What `value` is made by. Raises HeadError."""
        linears, core = self.between(value)
        if len(linears) != 3:
            raise self.refused(value, f"attention over three linears q, k and v (it reads {len(linears)})")
        heads = {name: self.heads(name, core) for name in linears}
        dims = {dim for _, dim in heads.values()}
        if len(dims) != 1 or dims.pop() % 2:
            raise self.refused(value, f"attention over heads of one even size (here {', '.join(str(dim) for _, dim in heads.values())})")
        theta = self.theta(value, core, heads[linears[0]][1], weights)
        generator = np.random.default_rng(0)
        given = {name: generator.standard_normal((1, ROWS, self.graph.shape(name)[-1])) for name in linears}
        found = self.evaluated(value, core, given, weights)
        for q, k, v in itertools.permutations(linears):
            (num_heads, dim), (num_kv, _) = heads[q], heads[k]
            if num_kv != heads[v][0] or num_heads % num_kv:
                continue
            cut = {name: values.reshape(ROWS, -1, dim) for name, values in given.items()}
            wanted = attended(cut[q], cut[k], cut[v], theta)
            if found.size == wanted.size and np.abs(found.reshape(wanted.shape) - wanted).max() <= CLOSE * np.abs(wanted).max():
                return Attended(q, k, v, num_heads, num_kv, dim, theta)
        raise HeadError(f"{self.label}: '{value}' is not causal attention over heads of {heads[linears[0]][1]} that are rotated in halves "
                        f"with theta {theta:g}, scaled by 1 / sqrt(head size); no other is read")

    def between(self, value: str) -> tuple[list[str], list[str]]:
        """The linears that `value` is made of, and the nodes between, in the graph's order."""
        seen: set[str] = set()
        pending = [value]
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            op = self.graph.op(name)
            if isinstance(op, CausalMask) and op.window:
                raise self.refused(name, f"attention without a window (it has one of {op.window})")
            if isinstance(op, Input) and name != "tokens":
                raise self.refused(name, "nothing but q, k, v, positions and a mask in attention")
            if not isinstance(op, Linear):
                pending.extend(self.graph.inputs(name))
        ordered = [name for name in self.graph.builder.nodes if name in seen]
        return [name for name in ordered if isinstance(self.graph.op(name), Linear)], ordered

    def heads(self, linear: str, core: list[str]) -> tuple[int, int]:
        """How many heads of what size a projection is cut into."""
        at = linear
        while (shape := self.graph.shape(at))[-1] == self.graph.shape(linear)[-1]:
            users = [name for name in core if isinstance(self.graph.op(name), Reshape) and self.graph.inputs(name) == (at,)]
            if not users:
                raise HeadError(f"{self.label}: '{linear}' is not reshaped into heads, as q, k and v of attention are")
            at = users[0]
        return shape[-2], shape[-1]

    def theta(self, value: str, core: list[str], dim: int, weights: WeightSource) -> float:
        """The base of plain RoPE, from the tensor of its frequencies: the shortest number that gives them as f32 has them."""
        vectors = (name for name in core if isinstance(self.graph.op(name), Weight) and max(self.graph.shape(name)) in (dim // 2, dim))
        for name in vectors:
            values = weights.read(self.tensor(name)).reshape(-1)[: dim // 2].astype(np.float64)
            if values[0] != 1 or not 0 < values[-1] < 1:
                continue
            about = float(values[-1] ** (-dim / (dim - 2)))
            for theta in (float(f"{about:.{digits}g}") for digits in range(1, 8)):
                if np.allclose(values, frequencies(theta, dim), rtol=3e-6, atol=0):
                    return theta
        raise HeadError(f"{self.label}: '{value}': attention reads no tensor of {dim // 2} frequencies of plain RoPE, as it must")

    def evaluated(self, value: str, core: list[str], given: dict[str, Array], weights: WeightSource) -> Array:
        """`value` in float64, with `given` in place of the linears."""
        from mlsdc.compiler.interpret import interpret
        from mlsdc.compiler.weights import read_weight

        nodes, builder = self.graph.builder.nodes, Builder("attention")
        for name in core:
            node = nodes[name]
            if isinstance(node.op, Weight) and isinstance(node.type, TensorType):
                builder.weight(name, node.type, *node.op.sources)
            elif name in given or isinstance(node.op, Input):
                builder.input(name, node.type)
            else:
                builder.add(name, node.op, *node.inputs)
        if "tokens" in core:
            given = {**given, "tokens": np.zeros((1, ROWS), np.int32)}
        import torch

        try:
            made = interpret(builder.build(made=value), given, lambda node: read_weight(node, weights), dtype=torch.float64)["made"]
        except (IrError, RuntimeError) as error:
            first = (str(error).splitlines() or [""])[0]
            raise HeadError(f"{self.label}: '{value}': its attention cannot be evaluated ({first})") from None
        return np.asarray(made)


def frequencies(theta: float, dim: int) -> Array:
    """f64[dim / 2]: theta^(-2 i / dim)."""
    made: Array = theta ** (-np.arange(0, dim, 2) / dim)
    return made


def attended(q: Array, k: Array, v: Array, theta: float) -> Array:
    """q[n, heads, d], k and v[n, kv_heads, d] -> f64[n, heads d]."""
    n, heads, d = q.shape
    angles = np.arange(n)[:, None, None] * frequencies(theta, d)
    cos, sin = np.cos(angles), np.sin(angles)

    def turned(x: Array) -> Array:
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    k, v = (np.repeat(x, heads // x.shape[1], 1) for x in (turned(k), v))
    scores = np.einsum("ihd,jhd->hij", turned(q), k) / np.sqrt(d)
    scores = np.where(np.tri(n, dtype=np.bool_), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result: Array = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v).reshape(n, -1)
    return result
