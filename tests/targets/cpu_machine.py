"""Runs graphs on the CPU target's own kernels, launch by launch: what kernel tests compare with the interpreter.

Every value has a buffer of its own. All memory is poisoned first (0xFF: NaN in f32 and bf16), so what a kernel leaves out or reads too
far shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mlsdc.compiler.graph import Graph, Input, Node, Weight
from mlsdc.compiler.quantise import A8
from mlsdc.compiler.types import GROUP, DType, TensorType
from mlsdc.runtime.program import FloatArg, InputArg, IntArg, PoolArg
from mlsdc.runtime.step import INPUTS, Header, Limits, StepBuffers, aligned
from mlsdc.targets.cpu import CpuTarget, kv_geometry, storage
from mlsdc.targets.cpu_build import ENTRY
from mlsdc.targets.cpu_isa import ISAS, CpuIsa
from mlsdc.targets.cpu_layout import a8_offsets, unpack_a8
from mlsdc.targets.protocol import Call, Declined, KernelSpec, Lowering, TempRef, ValueRef
from mlsdc.templates.params import padded
from tests.once import once

Array = npt.NDArray[Any]
Ranges = Callable[[int], Iterable[tuple[int, int]]]
ISA = ISAS["cpu-x86-64-v4"]
POISON = 0xFF
GUARD = 4096
INT, FLOAT, POINTER = 1, 3, 4  # tvm-ffi type indices


def whole(grid: int) -> Iterable[tuple[int, int]]:
    """One call for all tasks."""
    return [(0, grid)]


def one_by_one_backwards(grid: int) -> Iterable[tuple[int, int]]:
    """Every task in a call of its own, the last one first: no order of tasks may matter."""
    return [(task, task + 1) for task in reversed(range(grid))]


class Machine:
    """The kernels of some graphs, built once, at one artifact's limits."""

    def __init__(self, target: CpuTarget, folder: Path) -> None:
        self.target = target
        self.folder = folder
        self._library = ctypes.CDLL(str(folder / "kernels" / target.name / "kernels.so"))

    @staticmethod
    def build(factory: pytest.TempPathFactory, name: str, limits: Limits, graphs: Iterable[Graph], isa: CpuIsa = ISA) -> Machine:
        """Kernels of all nodes of all graphs; skips where this machine cannot run them."""
        from mlsdc.runtime.device.cpu_features import cpu_features

        if not cpu_features().issuperset(isa.requires):
            pytest.skip(f"this machine does not run {isa.name}")
        import mlsdc.runtime.device.cpu as device

        device.import_tvm_ffi()  # the kernels raise errors through it
        target = CpuTarget(isa, limits)
        specs = [spec for graph in graphs for spec in specs_of(target, graph)]

        def make(folder: Path) -> None:
            target.build(specs, folder)

        return Machine(target, once(factory, name, make))

    def call(self, spec: KernelSpec, lo: int, hi: int, args: Sequence[int | float | Array]) -> None:
        """Tasks [lo, hi) of a kernel. Raises RuntimeError if it refuses its arguments."""
        table = np.zeros((2 + len(args), 2), np.int64)
        table[:2] = (INT, lo), (INT, hi)
        for row, arg in zip(table[2:], args, strict=True):
            if isinstance(arg, float):
                row[0] = FLOAT
                row[1:].view(np.float64)[0] = arg
            else:
                row[:] = (INT, arg) if isinstance(arg, int) else (POINTER, arg.ctypes.data)
        result = np.zeros(2, np.int64)
        function = getattr(self._library, ENTRY + spec.key)
        if function(None, ctypes.c_void_p(table.ctypes.data), len(table), ctypes.c_void_p(result.ctypes.data)):
            raise RuntimeError(f"{spec.key} refused its arguments")

    def run(self, graph: Graph, values: Mapping[str, Any], buffers: StepBuffers | None = None, pool: Array | None = None, *,
            ranges: Ranges = whole, over: Mapping[str, str] | None = None) -> dict[str, Array]:
        """Every node's storage, u8, after running the graph's launches in order. `values` are the inputs and weights by name.

        Step inputs are read from `buffers`, row counts from its header; `pool` is changed in place. `over` places values over others.
        """
        buffers = buffers or StepBuffers(self.target.limits, 16)
        memory: dict[str, Array] = {}
        for node in graph:
            if over is not None and node.name in over:
                memory[node.name] = memory[over[node.name]]
            elif isinstance(node.type, TensorType) and node.name not in INPUTS:
                size = self.target.packed_bytes(node.type) if isinstance(node.op, Weight) else storage(node.type)
                memory[node.name] = poisoned(size)
                if node.name in values:
                    put(self.target, node, values[node.name], memory[node.name])
        kept: dict[str, Array] = {}
        for lowering in self.target.prologue(graph):
            kept |= {name: poisoned(size) for name, size in lowering.temps.items()}
            self._launch(lowering, memory, kept, buffers, pool, ranges)
        for node in graph:
            if isinstance(node.op, Input | Weight):
                continue
            lowered = self.target.lower(node, graph)
            assert not isinstance(lowered, Declined), lowered.why
            if lowered.alias_of is not None:
                memory[node.name] = memory.get(lowered.alias_of, poisoned(64))
            temps = {name: poisoned(size) for name, size in lowered.temps.items()}
            self._launch(lowered, memory, kept | temps, buffers, pool, ranges)
            for name, array in (memory | kept | temps).items():
                assert_guarded(f"%{node.name}: {name}", array)
        return memory

    def launch(self, lowering: Lowering, buffers: StepBuffers, pool: Array, ranges: Ranges = whole) -> None:
        """A lowering over step inputs and the pool only."""
        self._launch(lowering, {}, {}, buffers, pool, ranges)

    def _launch(self, lowering: Lowering, memory: dict[str, Array], temps: dict[str, Array], buffers: StepBuffers, pool: Array | None,
                ranges: Ranges) -> None:
        for call in lowering.calls:
            grid = call.grid * (1 if call.count is None else int(buffers.header[Header[call.count]]))
            args = [self._argument(arg, memory, temps, buffers, pool) for arg in call.args]
            for lo, hi in ranges(grid):
                self.call(call.spec, lo, hi, args)

    def _argument(self, arg: Any, memory: dict[str, Array], temps: dict[str, Array], buffers: StepBuffers, pool: Array | None
                  ) -> int | float | Array:
        if isinstance(arg, ValueRef):
            return getattr(buffers, arg.value) if arg.value in INPUTS else memory[arg.value][arg.offset :]
        if isinstance(arg, TempRef):
            return temps[arg.temp]
        if isinstance(arg, InputArg):
            return getattr(buffers, arg.input)  # type: ignore[no-any-return]
        if isinstance(arg, PoolArg):
            assert pool is not None
            return pool.reshape(-1)[arg.pool :]
        assert isinstance(arg, IntArg | FloatArg)
        return arg.int if isinstance(arg, IntArg) else arg.float


def specs_of(target: CpuTarget, graph: Graph) -> list[KernelSpec]:
    calls: list[Call] = [call for lowering in target.prologue(graph) for call in lowering.calls]
    for node in graph:
        if not isinstance(node.op, Input | Weight):
            lowered = target.lower(node, graph)
            assert not isinstance(lowered, Declined), f"{graph.name}: {node.name}: {lowered.why}"
            calls += lowered.calls
    geometry = kv_geometry(graph)
    if geometry is not None:
        calls += target.commit(geometry).calls
    return [call.spec for call in calls]


def poisoned(num_bytes: int) -> Array:
    """Memory between two guard zones that nobody may write to."""
    array = aligned((num_bytes + 2 * GUARD,), "u1")
    array[:] = POISON
    return array[GUARD : GUARD + num_bytes]


def assert_guarded(name: str, memory: Array) -> None:
    """Raises AssertionError if something was written beyond the end or before the start of memory that `poisoned` gave."""
    size = memory.nbytes + 2 * GUARD
    around: Array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(memory.ctypes.data - GUARD))
    assert (around[:GUARD] == POISON).all(), f"written before {name}"
    assert (around[GUARD + memory.nbytes :] == POISON).all(), f"written beyond {name}"


def put(target: CpuTarget, node: Node, value: Any, memory: Array) -> None:
    """Lay a value out as the target stores it; rows beyond the value's stay poisoned."""
    type_ = node.type
    assert isinstance(type_, TensorType)
    if isinstance(value, A8):
        put_a8(value, memory, a8_rows(type_))
    elif isinstance(node.op, Weight):
        packed = target.pack(type_, value)
        memory[: len(packed)] = packed
    else:
        array = np.ascontiguousarray(value, np.int32 if type_.dtype is DType.I32 else np.float32)
        memory[: array.nbytes] = array.reshape(-1).view(np.uint8)


def a8_rows(type_: TensorType) -> int:
    from mlsdc.targets.cpu import rows_of

    return rows_of(type_)[2]


def put_a8(value: A8, memory: Array, rows_padded: int) -> None:
    """The inverse of cpu_layout.unpack_a8, corrections included; pads columns to 64 with zeros."""
    rows, k = value.codes.shape
    columns = padded(k, 64)
    codes, scales = np.zeros((rows, columns), np.int8), np.zeros((rows, columns // GROUP), np.float32)
    codes[:, :k], scales[:, : k // GROUP] = value.codes, value.scales
    corrections = -128 * codes.reshape(rows, -1, GROUP).astype(np.int32).sum(-1)
    scales_at, corrections_at, end = a8_offsets(rows_padded, k)
    words, tops = memory[:scales_at].view(np.int32), memory[scales_at:corrections_at].view(np.float32)
    sums = memory[corrections_at:end].view(np.float32)
    for row in range(rows):
        tile, m = divmod(row, 8)
        mt = min(8, rows - 8 * tile)
        words[tile * 2 * columns + np.arange(columns // 4) * mt + m] = codes[row].view(np.int32)
        at = tile * columns // 4 + np.arange(columns // GROUP) * mt + m
        tops[at], sums[at] = scales[row], corrections[row]


def get_a8(memory: Array, type_: TensorType, rows: int) -> tuple[A8, Array]:
    """An a8 value's codes and scales, padding columns included, and its corrections f32[rows, groups]."""
    assert isinstance(type_.shape[1], int)
    columns, rows_padded = padded(type_.shape[1], 64), a8_rows(type_)
    _, corrections_at, end = a8_offsets(rows_padded, columns)
    sums = memory[corrections_at:end].view(np.float32)
    corrections = np.empty((rows, columns // GROUP), np.float32)
    for row in range(rows):
        tile, m = divmod(row, 8)
        corrections[row] = sums[tile * columns // 4 + np.arange(columns // GROUP) * min(8, rows - 8 * tile) + m]
    return unpack_a8(memory, rows, rows_padded, columns), corrections


def get(memory: Array, rows: int, *shape: int, dtype: str = "f4") -> Array:
    """The first rows of a plain row-wise value."""
    return memory[: rows * int(np.prod(shape)) * 4].view(dtype).reshape(rows, *shape).copy()


def counted(limits: Limits, rows: int, out: int = 0, page_size: int = 16) -> StepBuffers:
    """Step buffers that say only how many rows there are."""
    buffers = StepBuffers(limits, page_size)
    buffers.header[Header.ROWS], buffers.header[Header.OUT] = rows, out
    return buffers
