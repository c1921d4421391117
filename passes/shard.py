"""shard: attention heads and MLP columns split over the ranks of a tensor-parallel artifact."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Builder, Editor, Graph, Input, Node, Weight
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.ops import Op
from mlsdc.compiler.ops_core import Binary, Reshape, Scalar, Unary
from mlsdc.compiler.ops_nn import Attention, Linear, RmsNorm, Rope
from mlsdc.compiler.ops_shard import AllReduce
from mlsdc.compiler.pipeline import Pass
from mlsdc.compiler.rewrite import note
from mlsdc.compiler.types import GROUP, TensorType
from mlsdc.passes.quantise_weights import is_head


@dataclass(frozen=True)
class Shard(Pass):
    """Each rank gets whole heads of every attention and columns of every MLP; what follows them is summed over the ranks.

    Before::

        %q = linear(%h, %w.q)  %q_heads = reshape(%q, shape=[-1, 4, 32])  ...  %a = attention(%q_rope, %k_rope, %v_heads)
        %merged = reshape(%a, shape=[-1, 128])    %out = linear(%merged, %w.out, %bias)

    After, for 2 ranks (the weights of q, k and v, and of a gate and an up, are the rank's rows, those of out and down its columns)::

        %w.q = weight(shard=[0, 0, 2]) : f32[64, 128]   %q_heads = reshape(%q, shape=[-1, 2, 32])   %a : f32[rows, 2, 32]
        %out.part = linear(%merged, %w.out)    %out.sum = all_reduce(%out.part, ranks=2)    %out = binary(%out.sum, %bias, fn="add")

    The graph is rank 0's; another rank's differs in nothing but the rank in its weights' `shard`. Embeddings, norms, the head and the
    exit of a `self` level are whole on every rank. The target and levels that are a part of it (`self`) are split, other levels run on
    rank 0 alone.

    Raises CompileError, naming the node, for what it cannot split: the pass is there only where model.yaml asks for it.
    """

    name: ClassVar[str] = "shard"
    ranks: int = 1

    def run(self, module: Module) -> Module:
        if self.ranks == 1:
            return module
        return replace(module, levels=tuple(self._level(level, level is module.target) for level in module.levels))

    def _level(self, level: LevelModule, is_target: bool) -> LevelModule:
        if not is_target and level.kind != "self":
            return level
        return replace(level, graphs={name: sharded(graph, self.ranks) for name, graph in level.graphs.items()})


def is_split(level: LevelModule) -> bool:
    """Whether ranks have files of their own of the level's weights."""
    return any(isinstance(node.op, Weight) and node.op.shard for graph in level.graphs.values() for node in graph)


def of_rank(level: LevelModule, rank: int) -> LevelModule:
    """The same level with another rank's share of the weights."""
    def mine(node: Node) -> Node:
        if not isinstance(node.op, Weight) or not node.op.shard:
            return node
        axis, _, ranks = node.op.shard
        return replace(node, op=replace(node.op, shard=(axis, rank, ranks)))

    graphs = {name: replace(graph, nodes=tuple(mine(node) for node in graph)) for name, graph in level.graphs.items()}
    return replace(level, graphs=graphs)


def sharded(graph: Graph, ranks: int) -> Graph:
    """The rank program of a whole one. Raises CompileError."""
    return Sharding(graph, ranks).run()


ELEMENTWISE = (Unary, Scalar, Binary)
EXIT = "exit."  # how the names of an exit's nodes begin


class Sharding:
    def __init__(self, graph: Graph, ranks: int) -> None:
        self.graph, self.ranks = graph, ranks
        self.builder = Builder(graph.name)
        self.columns = self._column_linears()
        self.split: set[str] = set()  # values of which each rank has a part: the last axis of rank 2, the heads of rank 3
        self.parts: dict[str, int] = {}  # weight -> axis

    def run(self) -> Graph:
        for node in self.graph:
            if isinstance(node.op, Linear):
                self._weights_of(node)
        for node in self.graph:
            self._node(node)
        graph = self.builder.build(**dict(self.graph.outputs))
        whole = next((result for result, name in graph.outputs if name in self.split), None)
        if whole is not None:
            raise CompileError(f"tensor_parallel: output '{whole}' would be a part of itself on each rank")
        return graph

    # what is split

    def _column_linears(self) -> set[str]:
        found: set[str] = set()
        for node in self.graph:
            if isinstance(node.op, Attention):
                heads, kv_heads = (self._heads(node, index) for index in (0, 1))
                if heads % self.ranks or kv_heads % self.ranks:
                    raise CompileError(f"tensor_parallel: {self.ranks} ranks cannot share the {heads} heads and {kv_heads} kv heads of "
                                       f"%{node.name}: both must be multiples of the number of ranks")
                found |= {self._projection(node, name) for name in node.inputs}
            elif isinstance(node.op, Linear):
                found |= self._gates(node)
        return found

    def _heads(self, attention: Node, index: int) -> int:
        type_ = self.graph[attention.inputs[index]].type
        assert isinstance(type_, TensorType)
        assert isinstance(type_.shape[1], int)
        return type_.shape[1]

    def _projection(self, attention: Node, name: str) -> str:
        """The linear that makes an attention's q, k or v."""
        node = self.graph[name]
        while isinstance(node.op, Rope | Reshape | RmsNorm):
            node = self.graph[node.inputs[0]]
        if not isinstance(node.op, Linear):
            raise self._cannot(node, f"%{attention.name} reads heads of it: one linear for each of q, k and v can be split")
        return node.name

    def _gates(self, down: Node) -> set[str]:
        """The linears whose results, combined element by element and read by nobody else, are what `down` reads."""
        leaves, waiting = set(), [down.inputs[0]]
        while waiting:
            node = self.graph[waiting.pop()]
            if len(set(self.graph.users[node.name])) != 1 or any(name == node.name for _, name in self.graph.outputs):
                return set()
            if isinstance(node.op, Linear):
                leaves.add(node.name)
            elif isinstance(node.op, ELEMENTWISE):
                waiting += node.inputs
            else:
                return set()
        return leaves

    def _weights_of(self, linear: Node) -> None:
        """Which axis of a linear's weight is split."""
        x, weight, *bias = linear.inputs
        if linear.name in self.columns:
            self._take(linear, weight, 0)
            for name in bias:
                self._take(linear, name, 0)
        elif self._reads_part(x):
            self._take(linear, weight, 1)
        elif not linear.name.startswith(EXIT) and not is_head(Editor(self.graph), linear):
            raise self._cannot(linear, "it is neither before nor after an attention or an MLP's product")

    def _reads_part(self, name: str) -> bool:
        node = self.graph[name]
        if isinstance(node.op, Attention):
            return True
        if isinstance(node.op, Linear):
            return node.name in self.columns
        return isinstance(node.op, (Reshape, *ELEMENTWISE)) and all(self._reads_part(value) for value in node.inputs)

    def _take(self, linear: Node, weight: str, axis: int) -> None:
        node = self.graph[weight]
        if not isinstance(node.op, Weight) or not isinstance(node.type, TensorType) or len(self.graph.users[weight]) != 1:
            raise self._cannot(linear, f"%{weight} is read by others, too")
        size = node.type.shape[axis]
        if not isinstance(size, int) or size % (self.ranks * GROUP):
            raise self._cannot(linear, f"its {size} {'columns' if axis else 'rows'} are no multiple of {self.ranks} x {GROUP}")
        self.parts[weight] = axis

    def _cannot(self, node: Node, why: str) -> CompileError:
        return CompileError(f"tensor_parallel: %{node.name} ({node.op.opname}) cannot be split over {self.ranks} ranks: {why}")

    # the graph of a rank

    def _node(self, node: Node) -> None:
        if isinstance(node.op, Input):
            self.builder.input(node.name, node.type)
        elif isinstance(node.op, Weight):
            self._weight(node, node.op)
        elif isinstance(node.op, Linear) and node.inputs[0] in self.split:
            self._summed(node)
        else:
            split = self._splits(node)
            op = self._smaller(node, node.op) if split and node.inputs[0] in self.split else node.op
            self.builder.add(node.name, op, *node.inputs, origin=node.origin)
            if split:
                self.split.add(node.name)

    def _weight(self, node: Node, op: Weight) -> None:
        assert isinstance(node.type, TensorType)
        axis = self.parts.get(node.name)
        if axis is None:
            self.builder.weight(node.name, node.type, *op.sources)
            return
        shape = list(node.type.shape)
        assert isinstance(shape[axis], int)
        shape[axis] = shape[axis] // self.ranks  # type: ignore[operator]
        self.builder.weight(node.name, node.type.with_shape(*shape), *op.sources, shard=(axis, 0, self.ranks))

    def _splits(self, node: Node) -> bool:
        """Whether each rank has a part of the value. Raises CompileError for an op that needs the whole of a part."""
        if node.name in self.columns:
            return True
        read = [name in self.split for name in node.inputs]
        if not any(read):
            return False
        type_ = node.type
        by_head = isinstance(type_, TensorType) and type_.rank == 3
        fits = isinstance(node.op, Rope) and read == [True, False]
        fits |= isinstance(node.op, RmsNorm) and by_head and read == [True, False]
        fits |= isinstance(node.op, (Reshape, Attention, *ELEMENTWISE)) and all(read)
        if not fits:
            raise self._cannot(node, "it reads a part of what it needs whole")
        return True

    def _smaller(self, node: Node, op: Op) -> Op:
        """Reshapes name sizes: of [-1, heads, d] the heads, of [-1, n] the columns."""
        if not isinstance(op, Reshape):
            return op
        if len(op.shape) not in (2, 3) or op.shape[0] != -1 or not isinstance(op.shape[1], int) or op.shape[1] % self.ranks:
            raise self._cannot(node, f"its shape {list(op.shape)} does not split")
        return Reshape((-1, op.shape[1] // self.ranks, *op.shape[2:]))

    def _summed(self, node: Node) -> None:
        x, weight, *bias = node.inputs
        part = self.builder.add(f"{node.name}.part", Linear(), x, weight, origin=node.origin)
        total = f"{node.name}.sum" if bias else node.name
        self.builder.add(total, AllReduce(self.ranks), part, origin=node.origin)
        if bias:
            self.builder.add(node.name, Binary("add"), total, bias[0], origin=node.origin)
        note("linear(x, w, bias) -> all_reduce(linear(part of x, columns of w)) + bias", self.graph.name, node.name)
