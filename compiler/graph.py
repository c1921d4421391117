"""SSA graphs of immutable nodes, and the editor that passes change them with.

A graph is a tuple of nodes in topological order; inputs and weights are nodes without inputs. A node makes one value, and
the node's name is the value's name: path-like, and stable through passes (`layers.3.attn.scores`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from mlsdc.compiler.errors import IrError
from mlsdc.compiler.ops import Mismatch, Op, op
from mlsdc.compiler.types import Type


@op("input")
@dataclass(frozen=True)
class Input(Op):
    """A value the step hands in; the node's name is the input's name, its type is given."""


@op("weight")
@dataclass(frozen=True)
class Weight(Op):
    """A tensor of the level's weight file. `sources` are the names in the checkpoint; several are stacked along axis 0.

    `shard` (axis, rank, ranks): of each source, that part of `ranks` equal ones along the axis.
    """

    sources: tuple[str, ...]
    shard: tuple[int, ...] = ()


@dataclass(frozen=True)
class Node:
    """One op applied to the values named by `inputs`. `origin` says where in the source model it comes from."""

    name: str
    op: Op
    inputs: tuple[str, ...]
    type: Type
    origin: str = ""


@dataclass(frozen=True)
class Graph:
    """`nodes` in topological order; `outputs` maps result names (`logits`, `choices`, `kv`) to node names, in order."""

    name: str
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str], ...]

    @cached_property
    def by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        """Value name -> names of the nodes that use it (outputs not counted)."""
        users: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                users[name].append(node.name)
        return {name: tuple(names) for name, names in users.items()}

    def __getitem__(self, name: str) -> Node:
        try:
            return self.by_name[name]
        except KeyError:
            raise IrError(f"graph '{self.name}' has no value '%{name}'") from None

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def inputs(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if isinstance(node.op, Input))

    def weights(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if isinstance(node.op, Weight))

    def verify(self) -> None:
        """Names are unique and defined before use, every type is what its op infers, outputs exist. Raises IrError."""
        seen: dict[str, Node] = {}
        for node in self.nodes:
            if node.name in seen:
                raise IrError(f"%{node.name} is defined twice")
            for name in node.inputs:
                if name not in seen:
                    raise IrError(f"%{node.name} uses %{name} before it is defined")
            if isinstance(node.op, Input | Weight):
                if node.inputs:
                    raise IrError(f"%{node.name}: {node.op.opname} takes no inputs, found {len(node.inputs)}")
            else:
                inferred = infer(node.name, node.op, [seen[name].type for name in node.inputs])
                if inferred != node.type:
                    raise IrError(f"%{node.name}: has type {node.type}, but {node.op.opname} gives {inferred}")
            seen[node.name] = node
        for result, name in self.outputs:
            if name not in seen:
                raise IrError(f"output '{result}' names %{name}, which is not defined")


def infer(name: str, op_: Op, inputs: Iterable[Type]) -> Type:
    """The op's type rule, with the node's name in front of its error."""
    try:
        return op_.infer(*inputs)
    except Mismatch as error:
        raise IrError(f"%{name}: {op_.opname} {error}") from None


@dataclass
class Builder:
    """Appends nodes one by one; the way captures and tests make a graph."""

    name: str
    nodes: dict[str, Node] = field(default_factory=dict)

    def input(self, name: str, type_: Type) -> str:
        return self._put(Node(name, Input(), (), type_))

    def weight(self, name: str, type_: Type, *sources: str, shard: tuple[int, ...] = ()) -> str:
        return self._put(Node(name, Weight(sources or (name,), shard), (), type_))

    def add(self, name: str, op_: Op, *inputs: str, origin: str = "") -> str:
        """Append `op_(inputs)` under `name`, with its inferred type; returns the name."""
        for value in inputs:
            if value not in self.nodes:
                raise IrError(f"%{name} uses %{value} before it is defined")
        return self._put(Node(name, op_, inputs, infer(name, op_, [self.nodes[i].type for i in inputs]), origin))

    def build(self, **outputs: str) -> Graph:
        graph = Graph(self.name, tuple(self.nodes.values()), tuple(outputs.items()))
        graph.verify()
        return graph

    def _put(self, node: Node) -> str:
        if node.name in self.nodes:
            raise IrError(f"%{node.name} is defined twice")
        self.nodes[node.name] = node
        return node.name


class Editor:
    """A graph being changed: passes replace nodes in place and add new ones before them; `finish` sorts, drops what is dead and verifies.

    All lookups see the changes made so far. A replaced node keeps its name, so its users need no change.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: dict[str, Node] = dict(graph.by_name)
        self.outputs = list(graph.outputs)
        self._users: dict[str, dict[str, None]] = {name: dict.fromkeys(users) for name, users in graph.users.items()}

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def users(self, name: str) -> tuple[Node, ...]:
        """Nodes that use the value, in no particular order; a graph output counts as no node (see `is_output`)."""
        return tuple(self.nodes[user] for user in self._users[name])

    def is_output(self, name: str) -> bool:
        return any(value == name for _, value in self.outputs)

    def only_user(self, name: str) -> Node | None:
        """The one node that uses the value, or None if there are more, none, or it is a graph output."""
        users = self.users(name)
        return users[0] if len(users) == 1 and not self.is_output(name) else None

    def producer(self, node: Node, index: int, kind: type[Op]) -> Node | None:
        """The node that makes input `index` of `node`, if its op is of that kind."""
        made = self.nodes[node.inputs[index]]
        return made if isinstance(made.op, kind) else None

    def add(self, name: str, op_: Op, *inputs: str, origin: str = "") -> str:
        """A new node; its name must be free."""
        if name in self.nodes:
            raise IrError(f"%{name} is defined twice")
        return self._put(Node(name, op_, inputs, infer(name, op_, [self.nodes[i].type for i in inputs]), origin))

    def input(self, name: str, type_: Type) -> str:
        if name in self.nodes:
            raise IrError(f"%{name} is defined twice")
        return self._put(Node(name, Input(), (), type_))

    def weight(self, name: str, type_: Type, *sources: str, shard: tuple[int, ...] = ()) -> str:
        if name in self.nodes:
            raise IrError(f"%{name} is defined twice")
        return self._put(Node(name, Weight(sources or (name,), shard), (), type_))

    def replace(self, name: str, op_: Op, *inputs: str) -> str:
        """Make value `name` by another op; the name, the origin and all users stay."""
        old = self.nodes[name]
        new = Node(name, op_, inputs, infer(name, op_, [self.nodes[i].type for i in inputs]), old.origin)
        self._drop_uses(old)
        return self._put(new)

    def retype(self, name: str, type_: Type) -> None:
        """Change the type of an input or weight (a pass that quantises weights); users are re-inferred by `finish`."""
        self.nodes[name] = replace(self.nodes[name], type=type_)

    def rename(self, old: str, new: str) -> None:
        """Give a node another name, in all of its users and outputs too."""
        if new in self.nodes:
            raise IrError(f"%{new} is defined twice")
        node = self.nodes.pop(old)
        users = self._users.pop(old)
        self._drop_uses(node)
        self.nodes[new] = replace(node, name=new)
        self._users[new] = users
        for value in node.inputs:
            self._users[value][new] = None
        for user in tuple(users):
            used = self.nodes[user]
            self.nodes[user] = replace(used, inputs=tuple(new if i == old else i for i in used.inputs))
        self.outputs = [(result, new if value == old else value) for result, value in self.outputs]

    def redirect(self, old: str, new: str) -> None:
        """Let every user of value `old`, outputs included, use value `new` instead."""
        for user in self.users(old):
            if user.name == new:
                continue
            self._drop_uses(user)
            self._put(replace(user, inputs=tuple(new if i == old else i for i in user.inputs)))
        self.outputs = [(result, new if value == old else value) for result, value in self.outputs]

    def finish(self, *, keep: Callable[[Node], bool] = lambda node: isinstance(node.op, Input)) -> Graph:
        """The new graph: topologically sorted (stable), re-inferred, without dead nodes, verified. Raises IrError on a cycle."""
        live: dict[str, None] = {}
        pending = [value for _, value in self.outputs] + [name for name, node in self.nodes.items() if keep(node)]
        while pending:
            name = pending.pop()
            if name in live:
                continue
            live[name] = None
            pending.extend(self.nodes[name].inputs)
        ordered = self._sorted(live)
        types: dict[str, Type] = {}
        nodes = []
        for node in ordered:
            if not isinstance(node.op, Input | Weight):
                node = replace(node, type=infer(node.name, node.op, [types[i] for i in node.inputs]))
            types[node.name] = node.type
            nodes.append(node)
        graph = Graph(self.graph.name, tuple(nodes), tuple(self.outputs))
        graph.verify()
        return graph

    def _sorted(self, live: dict[str, None]) -> list[Node]:
        done: set[str] = set()
        ordered: list[Node] = []
        for start in [name for name in self.nodes if name in live]:
            stack = [(start, False)]
            open_: set[str] = set()
            while stack:
                name, ready = stack.pop()
                if ready:
                    open_.discard(name)
                    if name not in done:
                        done.add(name)
                        ordered.append(self.nodes[name])
                    continue
                if name in done:
                    continue
                if name in open_:
                    raise IrError(f"%{name} depends on itself")
                open_.add(name)
                stack.append((name, True))
                stack.extend((value, False) for value in reversed(self.nodes[name].inputs) if value not in done)
        return ordered

    def _put(self, node: Node) -> str:
        self.nodes[node.name] = node
        self._users.setdefault(node.name, {})
        for value in node.inputs:
            self._users[value][node.name] = None
        return node.name

    def _drop_uses(self, node: Node) -> None:
        for value in node.inputs:
            self._users[value].pop(node.name, None)
