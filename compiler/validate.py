"""Translation validation: run a graph before and after a pass on the same small random step, and compare the outputs.

What is executed is the whole graph at its real shapes with random weights, on a few rows:

- while the graph has no cache yet: one sequence of 4 tokens, all of them prompt, every row wanting logits;
- once it has `kv` and `tree`: 7 rows of two sequences, one that verifies a tree (two siblings and a child of the second) after 5
  committed tokens whose keys and values are random, one that prefills 3 tokens, in shuffled pages.

Weights are random by *checkpoint tensor name*, so a weight that stacks three sources equals the three weights it replaced.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mlsdc.compiler.errors import IrError
from mlsdc.compiler.graph import Graph, Node, Weight
from mlsdc.compiler.interpret_core import Value
from mlsdc.compiler.interpret_state import Array, KvState, StepTree
from mlsdc.compiler.ops_nn import Embed
from mlsdc.compiler.quantise import A8, A16, F8, Q4, Q8
from mlsdc.compiler.types import DType, KvType, TensorType
from mlsdc.runtime.kv_format import KvGeometry, from_bf16
from mlsdc.runtime.tree import Tree, ancestor_words

ROWS = 4  # of a graph without a cache
COMMITTED, PROMPT = 5, 3  # of the two sequences of a graph with one
TREE = Tree(tokens=(0, 0, 0), parents=(-1, -1, 1))
STORED = 2.0**-7  # what rounding to bf16 may move a stored value, relative to the largest


@dataclass
class RandomWeights:
    """A weight source for `interpret`: random numbers of about unit gain, by checkpoint tensor name.

    `shapes` remembers every source's shape as first seen alone; that is how a stacked weight is put together.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def learn(self, graph: Graph) -> None:
        for node in graph.weights():
            if isinstance(node.op, Weight) and len(node.op.sources) == 1:
                self.shapes.setdefault(node.op.sources[0], static_shape(node))

    def __call__(self, node: Node) -> torch.Tensor:
        assert isinstance(node.op, Weight)
        shape, sources = static_shape(node), node.op.sources
        if len(sources) == 1:
            return torch.from_numpy(noise(sources[0], shape))
        rows = [self.shapes.get(source, (0,))[0] for source in sources]
        if 0 in rows:  # never seen alone: share out what is left
            rows = [n or (shape[0] - sum(rows)) // rows.count(0) for n in rows]
        if sum(rows) != shape[0]:
            raise IrError(f"%{node.name}: has {shape[0]} rows, its sources {', '.join(sources)} have {' + '.join(map(str, rows))}")
        parts = [noise(source, (n, *shape[1:])) for source, n in zip(sources, rows, strict=True)]
        return torch.from_numpy(np.concatenate(parts))


def static_shape(node: Node) -> tuple[int, ...]:
    if not isinstance(node.type, TensorType) or not all(isinstance(size, int) for size in node.type.shape):
        raise IrError(f"%{node.name}: a weight's shape must be static, found {node.type}")
    return tuple(size for size in node.type.shape if isinstance(size, int))


def noise(name: str, shape: tuple[int, ...]) -> Array:
    """Random f32 numbers that depend on the name only: vectors near 1 (norms, frequencies), matrices uniform, rows of about unit norm."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    count = int(np.prod(shape))
    bits = np.frombuffer(np.random.default_rng(seed).bytes(2 * count), np.int16)  # 16 bits a number: a model's worth in a second
    unit = bits.astype(np.float32).reshape(shape) / np.float32(2**15)
    if len(shape) < 2:
        return (1 + unit / 8).astype(np.float32)
    return (unit * np.float32((3 / shape[-1]) ** 0.5)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Step:
    """What the inputs of an execution are made of. `committed` tokens of the first sequence are in its pages already."""

    tree: StepTree
    committed: int


@functools.cache
def prompt_step() -> Step:
    return Step(StepTree.prefill(ROWS, 16), 0)


@functools.cache
def verify_step() -> Step:
    """The tree and the prompt of the module's docstring. Pages 3, 0 are the first sequence's, 2 its scratch, 1 the second's."""
    drafted = len(TREE) + 1
    positions = [COMMITTED, *(COMMITTED + depth for depth in TREE.depths()), *range(PROMPT)]
    i32 = np.int32
    tree = StepTree(
        np.array(positions, i32),
        np.array([0] * drafted + [1] * PROMPT, i32),
        np.array([*range(drafted), *[-1] * PROMPT], i32),
        np.array(ancestor_words(TREE) + [0] * PROMPT, np.uint64),
        np.array([COMMITTED, 0], i32),
        np.array([[3, 0], [1, 0]], i32),
        np.array([[2], [2]], i32),
    )
    return Step(tree, COMMITTED)


def step_for(before: Graph, after: Graph) -> Step:
    """The step that both graphs can run: a verify if both have a cache, else a prompt."""
    paged = all(any(isinstance(node.type, KvType) for node in graph.inputs()) for graph in (before, after))
    return verify_step() if paged else prompt_step()


def feed(graph: Graph, step: Step) -> dict[str, Any]:
    """A value for every input of the graph; inputs of one name mean the same in any two graphs."""
    return {node.name: input_value(graph, node, step) for node in graph.inputs()}


def input_value(graph: Graph, node: Node, step: Step) -> Any:
    """Every symbolic size is the step's number of rows; tokens (what an embed reads) are random, other integers count up."""
    if isinstance(node.type, KvType):
        return random_cache(node.type, step)
    if not isinstance(node.type, TensorType):
        return step.tree
    if node.name == "positions":
        return step.tree.positions
    shape = tuple(size if isinstance(size, int) else step.tree.num_rows for size in node.type.shape)
    random = np.random.default_rng(0)
    if node.type.dtype in (DType.F32, DType.F16, DType.BF16):
        return random.standard_normal(shape).astype(np.float32)
    for user in graph.users[node.name]:
        table = graph[graph[user].inputs[1]].type if isinstance(graph[user].op, Embed) else None
        if isinstance(table, TensorType) and isinstance(table.shape[0], int):
            return random.integers(0, table.shape[0], shape)
    return np.resize(np.arange(shape[-1] if shape else 1), shape)


def random_cache(kv: KvType, step: Step) -> KvState:
    """Four pages of 0xFF bytes (poison: NaN if it is ever read), with random keys and values at the committed positions."""
    geometry = KvGeometry(kv.format, kv.page_size, kv.num_layers, kv.num_kv_heads, kv.head_dim)
    state = KvState.empty(geometry, 4, poison=255)
    if not step.committed:
        return state
    tree = replace(StepTree.prefill(step.committed, geometry.page_size), page_table=step.tree.page_table[:1])
    shape = (step.committed, geometry.num_kv_heads, geometry.head_dim)
    for layer in range(geometry.num_layers):
        random = np.random.default_rng(layer)
        keys, values = random.standard_normal(shape), random.standard_normal(shape)
        state = state.append(layer, tree, keys.astype(np.float32), values.astype(np.float32))
    return state


def difference(before: Value, after: Value, tolerance: float) -> str | None:
    """What is different, in words, or None. Integers are compared only where a pass claims to change no value: a choice may tip."""
    if isinstance(before, KvState) and isinstance(after, KvState):
        if before.geometry != after.geometry:
            return f"the cache is {before.geometry} before and {after.geometry} after"
        return unequal(stored(before), stored(after), max(tolerance, STORED))
    if isinstance(before, Q8 | Q4 | F8 | A8 | A16) and isinstance(after, Q8 | Q4 | F8 | A8 | A16):
        return unequal(before.dequantise(), after.dequantise(), tolerance)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None if before is after else f"is a {type(before).__name__} before and a {type(after).__name__} after"
    if before.numel() != after.numel():
        return f"has shape {list(before.shape)} before and {list(after.shape)} after"
    if not before.dtype.is_floating_point:
        exact = tolerance > 1e-4 or torch.equal(before.flatten(), after.flatten())
        return None if exact else f"{int((before.flatten() != after.flatten()).sum())} of {before.numel()} elements differ"
    return unequal(before.to(torch.float64).numpy(), after.to(torch.float64).numpy(), tolerance)


def unequal(before: Array, after: Array, tolerance: float) -> str | None:
    a, b = before.astype(np.float64).reshape(after.shape), after.astype(np.float64)
    odd = np.isfinite(a) != np.isfinite(b)
    with np.errstate(invalid="ignore"):
        error = np.where(odd, np.inf, np.nan_to_num(np.abs(a - b), nan=0.0))
    largest = np.abs(a[np.isfinite(a)]).max(initial=0.0)
    if not error.size or error.max() <= tolerance * max(largest, 1e-30):
        return None
    at = np.unravel_index(int((error > tolerance * max(largest, 1e-30)).argmax()), error.shape)
    return (
        f"largest error {error.max():.3g} on values up to {largest:.3g}, allowed {tolerance:g} of that; "
        f"first at {[int(i) for i in at]}: {a[at]:.6g} before, {b[at]:.6g} after"
    )


def stored(state: KvState) -> Array:
    """All keys and values of all pages; bytes that no one wrote (poison) are NaN in both."""
    geometry = state.geometry
    heads = [(layer, head) for layer in range(geometry.num_layers) for head in range(geometry.num_kv_heads)]
    blocks = (geometry.read(page, *at) for page in state.pool for at in heads)
    pages = np.stack([np.stack(pair) for pair in blocks])
    return pages if state.recent is None else np.concatenate([pages.reshape(-1), from_bf16(state.recent).reshape(-1)])
