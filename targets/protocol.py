"""What a target is: it lowers fused IR nodes to kernel launches, builds the kernels, and packs weights in its layout.

Lowering is pure and cheap; `build` is the only slow call. Passes (`select_kernels`, `plan_buffers`) are the same for all targets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Union

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.module import LevelModule
from mlsdc.compiler.quantise import F8, Q4, Q8
from mlsdc.compiler.types import Type
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.manifest import TargetInfo
from mlsdc.runtime.program import Arg, ProgramSpec, Tap
from mlsdc.runtime.step import Limits
from mlsdc.targets.hardware import TMA, hopper_only, only


class TemplateParams(Protocol):
    """A frozen dataclass of templates/params.py: everything a template may ask for, nothing else."""

    @property
    def key(self) -> str:
        """Readable and unique: `linear_q8_n960_k576_residual`. File name, log name and manifest key at once."""


@dataclass(frozen=True)
class KernelSpec:
    """A template and its parameters; equal specs are one kernel. `abi` names the arguments in order, as `name: type`."""

    template: str
    params: TemplateParams
    abi: tuple[str, ...]

    @property
    def key(self) -> str:
        return self.params.key


@dataclass(frozen=True)
class ValueRef:
    """Address of an IR value plus a byte offset: a weight, a step input (offset 0), or an intermediate in the arena."""

    value: str
    offset: int = 0


@dataclass(frozen=True)
class TempRef:
    """Address of a scratch buffer of this node, `Lowering.temps[name]` bytes."""

    temp: str


@dataclass(frozen=True)
class MapRef:
    """A tensor map of a value as a dense tensor of these sizes, outermost first (runtime.program.TensorMapArg)."""

    of: ValueRef
    shape: tuple[int, ...]


CallArg = Union[ValueRef, TempRef, MapRef, Arg]


@dataclass(frozen=True)
class Call:
    """One launch before buffers are placed. Grid, grain and bounds of the count as in runtime.program.Launch."""

    spec: KernelSpec
    grid: int
    count: str | None
    args: tuple[CallArg, ...]
    grain: int = 1
    over: int = 0
    upto: int = 0


@dataclass(frozen=True)
class Lowering:
    """A node as launches. `result_bytes` 0: the value has no storage of its own (a threaded kv cache, a view).

    `in_place_of`: the input whose buffer the result takes over, if nobody else needs that input afterwards.
    """

    calls: tuple[Call, ...]
    result_bytes: int
    temps: Mapping[str, int] = field(default_factory=dict)
    alias_of: str | None = None
    in_place_of: str | None = None


@dataclass(frozen=True)
class Declined:
    """Why a target cannot run a node."""

    why: str


class Target(ABC):
    """One kind of machine to generate code for. `select` never raises for an unsupported node: it declines."""

    name: str
    device: str
    requires: tuple[str, ...]
    exact: bool = True  # a row's bits are the same whoever shares its step (law L2); a mode that gives it up for speed says so here

    @property
    def family(self) -> str:
        """Targets that lay out all weights alike: they read the same files."""
        return self.device

    @abstractmethod
    def lower(self, node: Node, graph: Graph) -> Lowering | Declined:
        """The node's launches. Inputs and weights are never passed in."""

    @abstractmethod
    def prologue(self, graph: Graph) -> Sequence[Lowering]:
        """Launches that run once before the graph's nodes (attention work items); their temps live as long as the program."""

    def choose_attention(self, compiler: str) -> str | None:
        """Let another compiler's kernels (`nvrtc`) do attention, or say why not: here, that the machine is another one."""
        return hopper_only(self.name, self.requires)

    def ship_variants(self) -> None:
        """Build variants of kernels, too, among which `mlsdc tune` chooses, where the target has some: here, it has none."""
        return

    def choose_linear(self, how: str) -> str | None:
        """Let linears for many rows copy their operands by `tma`, or say why not: here, that the machine is another one."""
        return only(self.name, self.requires, *TMA)

    def commit(self, geometry: KvGeometry) -> Lowering:
        """The launch that copies `commit_src` token slots to `commit_dst` in the page pool. Raises CompileError where there is none yet."""
        raise CompileError(f"target {self.name} has no commit kernel yet")

    def sample(self, logits: Tap, vocab_size: int, base: int) -> tuple[Lowering, int]:
        """The launches that make `choices` by law L1 from the forward program's logits, and the bytes of arena they need.

        They may use the arena from `base` on. Raises CompileError where there are none yet.
        """
        raise CompileError(f"target {self.name} has no sampling kernels yet")

    def follow(self) -> Lowering | None:
        """The launch that follows every sequence's choices down its tree (runtime/followed.py); None: the host does it alone."""
        return None

    def level_functions(self, kind: str, params: Mapping[str, Any]) -> Sequence[KernelSpec]:
        """Host functions that a drafting level needs or can use. Raises CompileError where it has no graphs and the target no functions."""
        if kind == "ngram":
            raise CompileError(f"target {self.name} has no functions for a level of kind '{kind}' yet")
        return ()

    def grow(self, level: LevelModule, draft: ProgramSpec, vocab_size: int) -> Call | None:
        """The launch after each round of a level whose trees grow on the device, for the results of its `draft`; its last two arguments,
        the round and how many there are, are not among them. None: they grow on the host."""
        return None

    def level_bytes(self, kind: str, params: Mapping[str, Any], limits: Limits, counts_bytes: int) -> int:
        """Of the device's memory, for a level without programs, whose file of counts has so many bytes."""
        return 0

    def ahead(self, level: LevelModule, programs: Mapping[str, ProgramSpec], target: Mapping[str, ProgramSpec]
              ) -> Sequence[Call | str] | None:
        """How a level drafts behind the target's step, before the host knows what came of it: launches, and names of the level's own
        `programs` to run between them. None: it drafts when the host does."""
        return None

    @abstractmethod
    def packed_bytes(self, type_: Type) -> int:
        """Bytes of a weight of this type in the target's layout."""

    def layout(self, type_: Type) -> str:
        """A name of the bytes that `pack` makes of a weight of this type: where two targets say the same name, they make the same bytes."""
        return self.family

    @abstractmethod
    def pack(self, type_: Type, rows: npt.NDArray[Any] | Q8 | Q4 | F8) -> npt.NDArray[np.uint8]:
        """Lay out a weight given as f32[n, k] (or [n]), or as codes and scales where its type is q8 or q4; deterministic."""

    @abstractmethod
    def build(self, specs: Sequence[KernelSpec], directory: Path) -> TargetInfo:
        """Generate, compile and check the kernels into `directory` (kernels/<target>/...). Raises CompileError naming kernel and file."""
