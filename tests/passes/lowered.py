"""A target that lowers anything to one pretended launch, as tests say: for what comes after lowering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.ops_core import Reshape
from mlsdc.compiler.types import Dim, TensorType, Type
from mlsdc.runtime.manifest import TargetInfo
from mlsdc.targets.protocol import Call, CallArg, Declined, KernelSpec, Lowering, Target, TempRef, ValueRef

Change = Callable[[Node, Lowering], "Lowering | Declined"]


@dataclass(frozen=True)
class Params:
    key: str


def size_of(type_: Type) -> int:
    assert isinstance(type_, TensorType)
    return 4 * int(np.prod([size.hi if isinstance(size, Dim) else size for size in type_.shape]))


def unchanged(node: Node, lowering: Lowering) -> Lowering | Declined:
    return lowering


@dataclass(frozen=True)
class PretendTarget(Target):
    """One launch a node, whose kernel is named after the op; a reshape is a view. `change` has the last word."""

    change: Change = unchanged
    first: tuple[Lowering, ...] = ()
    name: str = "pretend"
    device: str = "none"
    requires: tuple[str, ...] = field(default=())

    def lower(self, node: Node, graph: Graph) -> Lowering | Declined:
        if isinstance(node.op, Reshape):
            return self.change(node, Lowering((), 0, alias_of=node.inputs[0]))
        return self.change(node, Lowering((call(node),), size_of(node.type)))

    def prologue(self, graph: Graph) -> Sequence[Lowering]:
        return self.first

    def packed_bytes(self, type_: Type) -> int:
        return size_of(type_)

    def pack(self, type_: Type, rows: Any) -> npt.NDArray[np.uint8]:
        raise NotImplementedError

    def build(self, specs: Sequence[KernelSpec], directory: Path) -> TargetInfo:
        raise NotImplementedError


def call(node: Node, *temps: str, count: str | None = "ROWS") -> Call:
    args: tuple[CallArg, ...] = (*(ValueRef(i) for i in node.inputs), ValueRef(node.name), *(TempRef(t) for t in temps))
    return Call(KernelSpec("none", Params(node.op.opname), ()), 1, count, args)
