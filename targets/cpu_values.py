"""IR values of a CPU program, read back from memory while it runs launch by launch: what `mlsdc diff` compares with the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mlsdc.compiler.graph import Graph
from mlsdc.compiler.interpret_state import KvState
from mlsdc.compiler.ops_kv import AppendKv
from mlsdc.compiler.ops_quant import AppendKvSlice
from mlsdc.compiler.quantise import A8, A16
from mlsdc.compiler.types import GROUP, DType, KvType, TensorType
from mlsdc.runtime.device.cpu import CpuLevel, CpuProgram
from mlsdc.runtime.device.host_list import ERROR
from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.kv_format import to_bf16
from mlsdc.runtime.program import ArenaArg, InputArg, Launch
from mlsdc.runtime.step import Array, Header
from mlsdc.targets.cpu_layout import unpack_a8
from mlsdc.targets.values import COUNTS, fine_of
from mlsdc.templates.params import padded
from mlsdc.templates.params_pages import chunk_of

NativeValue = Array | A8 | A16 | KvState
RESULT = {DType.F32: "Y", DType.I32: "Y", DType.A8: "YQ", DType.A16: "YQ"}  # names in kernel ABIs of what a launch writes


def run_launches(program: CpuProgram, graph: Graph) -> Iterator[tuple[str, str, NativeValue | None]]:
    """Run the program for what the step buffers say; after the last launch of each node yields (node, kernel, a copy of its value).

    None where this knows no layout. Raises DeviceError for a kernel that refuses its arguments.
    """
    level, launches = program.level, program.spec.launches
    recent = None if level.geometry is None else pages_of(level).recent
    device, header = level.device, level.buffers.header
    mine: list[Launch] = []
    for i, launch in enumerate(launches):
        device.launch_list(device.pool.ctypes.data, program.launches[i].ctypes.data, 1, header.ctypes.data)
        if device.pool[ERROR]:
            raise DeviceError(f"program '{program.name}': kernel '{launch.kernel}' of %{launch.node} refused its arguments; compile again")
        mine.append(launch)
        more = i + 1 < len(launches) and launches[i + 1].node == launch.node
        if not more and launch.node in graph.by_name:  # its result may be another launch's than its last one's
            values = ((one, read_value(level, graph, one, recent)) for one in reversed(mine))
            one, value = next(((one, value) for one, value in values if value is not None), (launch, None))
            yield launch.node, one.kernel, value
        if not more:
            mine = []


def pages_of(level: CpuLevel) -> KvState:
    """The pages that the step's rows are written to, or of a grouped format will be once they are full: pages 0 and on of one sequence."""
    geometry = level.geometry
    if not geometry.grouped:
        return KvState(geometry, level.pool.reshape(level.num_pages, -1).copy())
    count = -(-int(level.buffers.header[Header.ROWS]) // geometry.page_size)
    return replace(KvState.empty(geometry, count), pool=level.pool[: count * geometry.page_bytes].reshape(count, -1).copy())


def read_recent(level: CpuLevel, recent: Array, layer: int, rows: Array) -> None:
    """Set a layer's 16-bit forms in `recent` (interpret_state.KvState): those of the step's rows, which are in the arena now."""
    geometry, positions = level.geometry, level.buffers.positions
    chunk = chunk_of(geometry)
    for row in range(int(level.buffers.header[Header.ROWS])):
        page, slot = divmod(int(positions[row]), geometry.page_size)
        place, at = divmod(row, chunk.page_size)
        start = place * chunk.page_bytes
        for head in range(geometry.num_kv_heads):
            for which, x in enumerate(chunk.read(rows[start : start + chunk.page_bytes], 0, head)):
                recent[page, layer, head, slot, which] = to_bf16(x[at])


def read_value(level: CpuLevel, graph: Graph, launch: Launch, recent: Array | None = None) -> NativeValue | None:
    """A copy of what the launch wrote, in the value's logical shape: f32 or i32, a8 or a16, or the pages of the cache.

    `recent` is of a grouped format: what the rows' 16-bit forms were in layers that ran before; those of this one are set.
    """
    type_ = graph[launch.node].type
    if isinstance(type_, KvType):
        state = pages_of(level)
        if recent is None:
            return state
        chunk = named_args(level, launch).get("CHUNK")
        op = graph[launch.node].op
        if not isinstance(chunk, ArenaArg) or not isinstance(op, AppendKv | AppendKvSlice):
            return None
        read_recent(level, recent, op.layer, level.arena[chunk.arena :])
        return replace(state, recent=recent.copy())
    if not isinstance(type_, TensorType) or type_.dtype not in RESULT:
        return None
    names = named_args(level, launch)
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


def named_args(level: CpuLevel, launch: Launch) -> dict[str, object]:
    """The launch's arguments by their names in the kernel's ABI."""
    abi = [name.split(":")[0] for name in level.device.target.kernels[launch.kernel].abi]
    return dict(zip(abi, launch.args, strict=True))


def read_quantised(data: Array, codes_bytes: int, rows: int, k: int, fine: tuple[int, ...]) -> A8 | A16:
    """An a8 value, or an a16 one, whose second planes are more columns behind k's padding. `codes_bytes`: where the scales begin."""
    first = padded(k, 64)
    columns = first + padded(len(fine) * GROUP, 64)
    both = unpack_a8(data, rows, codes_bytes // columns, columns)

    def plane(start: int, count: int) -> A8:
        return A8(both.codes[:, start : start + count], both.scales[:, start // GROUP : (start + count) // GROUP])

    return A16(plane(0, k), plane(first, len(fine) * GROUP), fine) if fine else plane(0, k)
