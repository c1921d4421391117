"""The last step: a graph as the launch list that a device binds and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Graph, Input, Weight
from mlsdc.compiler.types import Dim, DType, TensorType
from mlsdc.passes.plan_buffers import plan_buffers
from mlsdc.passes.select_kernels import select_kernels
from mlsdc.runtime.levels.grown import AHEAD, PROGRAM
from mlsdc.runtime.program import ArenaArg, Arg, InputArg, IntArg, Launch, Mapped, ProgramSpec, Tap, TensorMapArg, WeightArg
from mlsdc.runtime.step import INPUTS
from mlsdc.targets.protocol import Call, CallArg, KernelSpec, Lowering, MapRef, Target, TempRef, ValueRef

TAP_DTYPES = {DType.F32: "f4", DType.I32: "i4"}


def emit_program(graph: Graph, target: Target, name: str, level: str) -> tuple[ProgramSpec, tuple[KernelSpec, ...]]:
    """Launches, arena and taps of a graph on a target, and the kernels they need. Raises CompileError for nodes without a kernel."""
    selected = select_kernels(graph, target)
    placement = plan_buffers(graph, selected)
    choices = {placement.roots.get(value, value) for result, value in graph.outputs if result == "choices"}

    def resolve(node: str, arg: CallArg) -> Arg:
        if isinstance(arg, TempRef):
            return ArenaArg(placement.temps[(node, arg.temp) if (node, arg.temp) in placement.temps else ("", arg.temp)])
        if isinstance(arg, MapRef):
            of = resolve(node, arg.of)
            assert isinstance(of, WeightArg | ArenaArg | InputArg)
            return TensorMapArg(Mapped(of, arg.shape))
        if not isinstance(arg, ValueRef):
            return arg
        made = graph[placement.roots.get(arg.value, arg.value)]
        if isinstance(made.op, Weight):
            return WeightArg(made.name)
        if isinstance(made.op, Input):
            if made.name not in INPUTS:
                raise CompileError(f"%{node}: reads input '{made.name}', which is not a step input")
            return InputArg(made.name)
        if made.name in choices:
            return InputArg("choices")
        return ArenaArg(placement.values[made.name] + arg.offset)

    launches: list[Launch] = []
    specs: dict[str, KernelSpec] = {}
    work = [("", lowering) for lowering in selected.prologue] + [(node.name, lowering) for node, lowering in selected.nodes]
    for node, lowering in work:
        for call in lowering.calls:
            launches.append(launch(node or call.spec.template, call, partial(resolve, node)))
            specs.setdefault(call.spec.key, call.spec)
    taps: dict[str, Tap] = {}
    for result, value in graph.outputs:
        type_ = graph[value].type
        if result != "choices" and isinstance(type_, TensorType):
            sizes = tuple(size.hi if isinstance(size, Dim) else size for size in type_.shape)
            taps[result] = Tap(placement.values[value], TAP_DTYPES[type_.dtype], sizes)  # type: ignore[arg-type]
    return ProgramSpec(name, level, placement.arena_bytes, tuple(launches), taps), tuple(specs.values())


def emit_lowering(lowering: Lowering, name: str, level: str) -> tuple[ProgramSpec, tuple[KernelSpec, ...]]:
    """A program that is one lowering over step inputs and the pool only (`commit`)."""
    launches = [launch(name, call, _no_values) for call in lowering.calls]
    return ProgramSpec(name, level, 0, tuple(launches), {}), tuple({call.spec.key: call.spec for call in lowering.calls}.values())


def emit_trees(draft: ProgramSpec, grow: Call, rounds: int) -> tuple[ProgramSpec, tuple[KernelSpec, ...]]:
    """The rounds of a level's `draft`, each followed by a launch that makes the next round's rows (runtime/levels/grown.py)."""
    launches: list[Launch] = []
    for at in range(rounds):
        call = replace(grow, args=(*grow.args, IntArg(at), IntArg(rounds)))
        launches += (*draft.launches, launch(PROGRAM, call, _no_values))
    return ProgramSpec(PROGRAM, draft.level, draft.arena_bytes, tuple(launches), {}), (grow.spec,)


def emit_ahead(level: str, programs: Mapping[str, ProgramSpec], parts: Sequence[Call | str]) -> tuple[ProgramSpec, tuple[KernelSpec, ...]]:
    """Launches, and a level's own programs between them, as one that runs behind the target's step. What the last one reports, it does."""
    launches: list[Launch] = []
    specs: list[KernelSpec] = []
    taps: Mapping[str, Tap] = {}
    for part in parts:
        if isinstance(part, str):
            launches += programs[part].launches
            taps = programs[part].taps
        else:
            launches.append(launch(AHEAD, part, _no_values))
            specs.append(part.spec)
    arena_bytes = max(programs[part].arena_bytes for part in parts if isinstance(part, str))
    return ProgramSpec(AHEAD, level, arena_bytes, tuple(launches), dict(taps)), tuple(specs)


def launch(node: str, call: Call, resolve: Callable[[CallArg], Arg]) -> Launch:
    return Launch(node, call.spec.key, call.grid, call.count, tuple(resolve(arg) for arg in call.args), call.grain, call.over, call.upto)


def _no_values(arg: CallArg) -> Arg:
    if isinstance(arg, ValueRef | TempRef | MapRef):
        raise CompileError(f"{arg} in a program without a graph")
    return arg


def merge_specs(groups: Iterable[Iterable[KernelSpec]]) -> tuple[KernelSpec, ...]:
    """Every kernel once, in order of first use. Equal keys must be equal kernels."""
    merged: dict[str, KernelSpec] = {}
    for group in groups:
        for spec in group:
            if merged.setdefault(spec.key, spec) != spec:
                raise CompileError(f"two different kernels are called '{spec.key}'")
    return tuple(merged.values())
