"""IR values of a CPU program, read back from memory while it runs launch by launch: what `mlsdc diff` compares with the interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlsdc.compiler.graph import Graph
from mlsdc.compiler.interpret_state import KvState
from mlsdc.compiler.quantise import A8, A16
from mlsdc.compiler.types import GROUP, DType, KvType, TensorType
from mlsdc.runtime.device.cpu import CpuLevel, CpuProgram
from mlsdc.runtime.device.host_list import ERROR
from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.program import ArenaArg, InputArg, Launch
from mlsdc.runtime.step import Array
from mlsdc.targets.cpu_layout import unpack_a8
from mlsdc.targets.values import COUNTS, fine_of
from mlsdc.templates.params import padded

NativeValue = Array | A8 | A16 | KvState
RESULT = {DType.F32: "Y", DType.I32: "Y", DType.A8: "YQ", DType.A16: "YQ"}  # names in kernel ABIs of what a launch writes


def run_launches(program: CpuProgram, graph: Graph) -> Iterator[tuple[str, str, NativeValue | None]]:
    """Run the program for what the step buffers say; after the last launch of each node yields (node, kernel, a copy of its value).

    None where this knows no layout. Raises DeviceError for a kernel that refuses its arguments.
    """
    level, launches = program.level, program.spec.launches
    device, header = level.device, level.buffers.header
    for i, launch in enumerate(launches):
        device.launch_list(device.pool.ctypes.data, program.launches[i].ctypes.data, 1, header.ctypes.data)
        if device.pool[ERROR]:
            raise DeviceError(f"program '{program.name}': kernel '{launch.kernel}' of %{launch.node} refused its arguments; compile again")
        more = i + 1 < len(launches) and launches[i + 1].node == launch.node
        if not more and launch.node in graph.by_name:
            yield launch.node, launch.kernel, read_value(level, graph, launch)


def read_value(level: CpuLevel, graph: Graph, launch: Launch) -> NativeValue | None:
    """A copy of what the launch wrote, in the value's logical shape: f32 or i32, a8 or a16, or the pages of the cache."""
    type_ = graph[launch.node].type
    if isinstance(type_, KvType):
        return KvState(level.geometry, level.pool.reshape(level.num_pages, -1).copy())
    if not isinstance(type_, TensorType) or type_.dtype not in RESULT:
        return None
    abi = [name.split(":")[0] for name in level.device.target.kernels[launch.kernel].abi]
    names = dict(zip(abi, launch.args, strict=True))
    shape = tuple(size if isinstance(size, int) else int(level.buffers.header[COUNTS[size.name][0]]) for size in type_.shape)
    if type_.dtype in (DType.A8, DType.A16):  # kernels that only quantise call their result as others call their input
        codes, scales = (names.get(f"Y{name}", names.get(old)) for name, old in (("Q", "XQ"), ("S", "SX")))
        if not isinstance(codes, ArenaArg) or not isinstance(scales, ArenaArg):
            return None
        return read_quantised(level.arena[codes.arena :], scales.arena - codes.arena, shape[0], shape[1], fine_of(graph, launch.node))
    result = names.get("Y")
    if isinstance(result, InputArg):
        return np.array(getattr(level.buffers, result.input)[: shape[0]])
    if not isinstance(result, ArenaArg):
        return None
    size = int(np.prod(shape)) * 4
    dtype = np.float32 if type_.dtype is DType.F32 else np.int32
    return level.arena[result.arena : result.arena + size].view(dtype).reshape(shape).copy()


def read_quantised(data: Array, codes_bytes: int, rows: int, k: int, fine: tuple[int, ...]) -> A8 | A16:
    """An a8 value, or an a16 one, whose second planes are more columns behind k's padding. `codes_bytes`: where the scales begin."""
    first = padded(k, 64)
    columns = first + padded(len(fine) * GROUP, 64)
    both = unpack_a8(data, rows, codes_bytes // columns, columns)

    def plane(start: int, count: int) -> A8:
        return A8(both.codes[:, start : start + count], both.scales[:, start // GROUP : (start + count) // GROUP])

    return A16(plane(0, k), plane(first, len(fine) * GROUP), fine) if fine else plane(0, k)
