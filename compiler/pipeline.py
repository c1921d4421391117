"""Passes and the pipeline that runs them: verify after each, watched from outside by observers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mlsdc.compiler.errors import IrError, PassError
from mlsdc.compiler.graph import Graph
from mlsdc.compiler.module import Module


@dataclass(frozen=True)
class Pass(ABC):
    """A module in, a module out. Options are the dataclass's fields. A pass never prints and never raises for what it does not match.

    `tolerance` is how far `--verify-each` lets an output move, relative to its largest element. A pass that changes values (it
    quantises, it stores 16 bits) declares more than the default, which is float error.
    """

    name: ClassVar[str]
    tolerance: ClassVar[float] = 1e-5

    @abstractmethod
    def run(self, module: Module) -> Module: ...


@dataclass(frozen=True)
class GraphPass(Pass):
    """A pass over each graph by itself."""

    @abstractmethod
    def rewrite(self, graph: Graph) -> Graph: ...

    def run(self, module: Module) -> Module:
        return module.map_graphs(self.rewrite)


class Observer:
    """Watches a pipeline; all hooks are optional. Dumping, timing, explaining and translation validation are observers."""

    def start(self, module: Module) -> None: ...

    def before(self, index: int, pass_: Pass, module: Module) -> None: ...

    def after(self, index: int, pass_: Pass, before: Module, after: Module) -> None: ...

    def finish(self, module: Module) -> None: ...


def run_pipeline(module: Module, passes: Sequence[Pass], observers: Sequence[Observer] = ()) -> Module:
    """Run the passes in order. Raises PassError naming the pass and the node when one breaks the graph."""
    for observer in observers:
        observer.start(module)
    for index, pass_ in enumerate(passes, 1):
        for observer in observers:
            observer.before(index, pass_, module)
        try:
            changed = pass_.run(module)
            changed.verify()
        except IrError as error:
            raise PassError(f"after '{pass_.name}': {error}") from error
        for observer in observers:
            observer.after(index, pass_, module, changed)
        module = changed
    for observer in observers:
        observer.finish(module)
    return module
