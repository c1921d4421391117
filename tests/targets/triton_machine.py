"""Graphs run launch by launch through NvidiaTarget and Triton's interpreter, for tests in a process with TRITON_INTERPRET=1.

Every array lies between guard zones, arena values begin as NaN bytes, and what a kernel must not write is compared afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.graph import Graph, Input, Weight
from mlsdc.compiler.types import TensorType
from mlsdc.runtime.program import FloatArg, InputArg, IntArg, Launch, PoolArg
from mlsdc.runtime.step import INPUTS, Header, Limits, StepBuffers
from mlsdc.runtime.tensor_map import tiles_of
from mlsdc.targets.nvidia import NvidiaTarget, storage
from mlsdc.targets.protocol import Call, Declined, Lowering, MapRef, TempRef, ValueRef
from mlsdc.targets.triton_build import render

Array = npt.NDArray[Any]
GUARD, POISON = 4096, 0xFF
TYPES = {"f32": "f4", "f64": "f8", "i32": "i4", "i64": "i8", "u8": "u1", "i8": "i1", "f16": "f2", "bf16": "u2"}


def as_bf16(data: Array) -> Any:
    """Bytes as a tensor of bf16 numbers: numpy has none."""
    import torch

    return torch.from_numpy(data[: len(data) // 2 * 2].view(np.int16)).view(torch.bfloat16)


def torch_of(data: Array) -> Any:
    import torch

    return torch.from_numpy(data)


def poisoned(size: int) -> Array:
    return np.full(2 * GUARD + -(-size // 64) * 64, POISON, np.uint8)


class TritonMachine:
    """The kernels of an artifact's limits; sources are written into `folder`."""

    def __init__(self, limits: Limits, folder: Path, gpu: str = "h100", exact: bool = True) -> None:
        self.target = NvidiaTarget(gpu, limits, exact)
        self.folder = folder

    def run(self, graph: Graph, values: Mapping[str, Any], buffers: StepBuffers, pool: Array | None = None,
            ranges: Callable[[int], Iterable[tuple[int, int]]] | None = None) -> dict[str, Array]:
        """Every node's storage, u8, after the graph's launches in order. `values`: inputs, and weights as they are packed, by name.

        `pool` is changed in place. `ranges`: run programs last to first if it splits them.
        """
        raw: dict[str, Array] = {}
        for node in graph:
            if isinstance(node.type, TensorType) and node.name not in INPUTS:
                if isinstance(node.op, Weight):
                    data = self.target.pack(node.type, values[node.name])
                elif isinstance(node.op, Input):
                    data = np.ascontiguousarray(values[node.name]).reshape(-1).view(np.uint8)
                else:
                    continue
                raw[node.name] = poisoned(max(len(data), storage(node.type)))
                raw[node.name][GUARD : GUARD + len(data)] = data
        kept: dict[str, Array] = {}
        for lowering in self.target.prologue(graph):
            kept |= {name: poisoned(size) for name, size in lowering.temps.items()}
            self._launch(lowering, raw, kept, buffers, pool, ranges)
        for node in graph:
            if isinstance(node.op, Input | Weight):
                continue
            lowered = self.target.lower(node, graph)
            assert not isinstance(lowered, Declined), f"%{node.name}: {lowered.why}"
            if lowered.alias_of is not None and lowered.alias_of in raw:
                raw[node.name] = raw[lowered.alias_of]
            elif lowered.result_bytes:
                raw[node.name] = poisoned(lowered.result_bytes)
            temps = {name: poisoned(size) for name, size in lowered.temps.items()}
            self._launch(lowered, raw, kept | temps, buffers, pool, ranges)
            for name, array in (raw | kept | temps).items():
                assert (array[:GUARD] == POISON).all() and (array[-GUARD:] == POISON).all(), f"%{node.name} wrote beside {name}"
        return {name: array[GUARD:-GUARD] for name, array in raw.items()}

    def launch(self, lowering: Lowering, buffers: StepBuffers, pool: Array,
               ranges: Callable[[int], Iterable[tuple[int, int]]] | None = None) -> None:
        """A lowering over step inputs and the pool only."""
        self._launch(lowering, {}, {}, buffers, pool, ranges)

    def _launch(self, lowering: Lowering, raw: dict[str, Array], temps: dict[str, Array], buffers: StepBuffers, pool: Array | None,
                ranges: Callable[[int], Iterable[tuple[int, int]]] | None) -> None:
        from mlsdc.targets.triton_interpreter import launch

        def argument(arg: Any, type_: str) -> Any:
            match arg:
                case ValueRef(name):
                    data = getattr(buffers, name).reshape(-1).view(np.uint8) if name in INPUTS else raw[name][GUARD:]
                case MapRef(of, shape):
                    from mlsdc.targets.triton_interpreter import descriptor

                    tiles = tiles_of(type_)
                    assert tiles is not None
                    data = argument(of, f"*{tiles.dtype}")
                    return descriptor(data if tiles.dtype == "bf16" else torch_of(data), shape, tiles)
                case TempRef(name):
                    data = temps[name][GUARD:]
                case InputArg(name):
                    data = getattr(buffers, name).reshape(-1).view(np.uint8)
                case PoolArg(offset):
                    assert pool is not None
                    data = pool.reshape(-1)[offset:]
                case IntArg(value) | FloatArg(value):
                    return value
                case _:
                    raise ValueError(f"unexpected argument {arg}")
            dtype = np.dtype(TYPES[type_.removeprefix("*")])
            if type_ == "*bf16":
                return as_bf16(data)
            return data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)

        for call in lowering.calls:
            grid = self.programs(call, buffers)
            backwards = ranges is not None and len(list(ranges(2))) > 1
            args = [argument(arg, entry.split(": ")[1]) for arg, entry in zip(call.args, call.spec.abi, strict=True)]
            launch(self.source(call), call.spec.key, grid, args, reverse=backwards)

    def programs(self, call: Call, buffers: StepBuffers) -> int:
        if call.count is None:
            return call.grid
        if not Launch("", "", 1, call.count, (), 1, call.over, call.upto).runs(int(buffers.header[Header[call.count]])):
            return 0
        grid = call.grid * -(-int(buffers.header[Header[call.count]]) // call.grain)
        return min(grid, getattr(call.spec.params, "most_programs", 0) or grid)

    def source(self, call: Call) -> Path:
        path = self.folder / f"k_{call.spec.key}.py"
        if not path.exists():
            path.write_text(render(call.spec))
        return path
