"""IR values of a GPU program, read back from the card while it runs launch by launch, and its weights as numbers: what the numerics of
`mlsdc bench gpu-check` compare with the reference interpreter. Needs neither triton nor a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.interpret_state import KvState
from mlsdc.compiler.quantise import A8, A16, F8, Q4, Q8
from mlsdc.compiler.types import GROUP, Dim, DType, KvType, TensorType
from mlsdc.runtime.device.cuda import CudaLevel
from mlsdc.runtime.device.cuda_program import CudaProgram
from mlsdc.runtime.kv_format import KvGeometry, from_bf16
from mlsdc.runtime.program import ArenaArg, Arg, InputArg, Launch
from mlsdc.runtime.step import Array
from mlsdc.runtime.weight_files import LevelWeights
from mlsdc.targets.nvidia_layout import f8_bytes, packed_bytes, unpack_q4, unpack_q8
from mlsdc.targets.values import COUNTS, fine_of, whole

Value = Array | A8 | A16 | KvState
RESULTS = ("y_ptr", "out_ptr")  # what kernels call the value they make


def run_launches(program: CudaProgram, graph: Graph, geometry: KvGeometry) -> Iterator[tuple[str, str, Value | None]]:
    """Run the program for what the step buffers say, one launch at a time; after the last of each node (node, kernel, its value).

    None where this knows no layout: pages of a grouped format, whose recent tokens lie elsewhere.
    """
    level = program.level
    header = level.counts()
    program.bring_inputs()
    launches = [bound for bound in program.launches if bound.programs(header)]
    mine: list[Launch] = []
    for i, bound in enumerate(launches):
        bound.enqueue(level.device, header)
        mine.append(bound.launch)
        if i + 1 < len(launches) and launches[i + 1].launch.node == bound.launch.node:
            continue
        if bound.launch.node in graph.by_name:
            node = graph[bound.launch.node]
            if isinstance(node.type, KvType):
                yield node.name, bound.launch.kernel, None if geometry.grouped else pages_of(level, geometry)
            else:
                found = ((one, read_value(level, graph, node, one)) for one in reversed(mine))
                one, value = next(((one, value) for one, value in found if value is not None), (bound.launch, None))
                yield node.name, one.kernel, value
        mine = []


def pages_of(level: CudaLevel, geometry: KvGeometry) -> KvState:
    """All pages as they are on the card; of a grouped format empty ones, whatever is on the card."""
    if geometry.grouped:
        return KvState.empty(geometry, level.num_pages)
    level.device.use()
    data = level.device.download(level.pool, level.num_pages * geometry.page_bytes)
    return KvState(geometry, data.reshape(level.num_pages, -1))


def argument(level: CudaLevel, launch: Launch, *names: str) -> Arg | None:
    """What a launch gives for the first parameter of one of these names; None if its kernel has none."""
    abi = level.device.kernel(launch.kernel).info.abi
    return next((arg for entry, arg in zip(abi, launch.args, strict=False) if entry.split(": ")[0] in names), None)


def read_value(level: CudaLevel, graph: Graph, node: Node, launch: Launch) -> Value | None:
    """A copy of what the launch wrote, in the value's logical shape."""
    type_ = node.type
    arg = argument(level, launch, *RESULTS)
    if not isinstance(type_, TensorType) or not isinstance(arg, ArenaArg | InputArg):
        return None
    device = level.device
    rows = type_.shape[0]
    assert isinstance(rows, Dim)
    count, columns = int(level.buffers.header[COUNTS[rows.name][0]]), int(np.prod(whole(type_)))
    at = level.address(launch, arg)
    if type_.dtype in (DType.A8, DType.A16):
        fine = fine_of(graph, node.name)
        wide = columns + GROUP * len(fine)
        codes = device.download(at, count * wide).view(np.int8).reshape(count, wide)
        scales = device.download(at + rows.hi * wide, 4 * count * (wide // GROUP)).view(np.float32).reshape(count, -1)
        plane = A8(codes[:, :columns].copy(), scales[:, : columns // GROUP].copy())
        return A16(plane, A8(codes[:, columns:].copy(), scales[:, columns // GROUP :].copy()), fine) if fine else plane
    if type_.dtype not in (DType.F32, DType.I32):
        return None
    dtype = np.float32 if type_.dtype is DType.F32 else np.int32
    return device.download(at, 4 * count * columns).view(dtype).reshape(count, *whole(type_))


def stored_weight(weights: LevelWeights, node: Node) -> npt.NDArray[Any] | Q8 | Q4 | F8:
    """A level's weight as numbers, or as codes and scales; the inverse of NvidiaTarget.pack."""
    assert isinstance(node.type, TensorType)
    shape, data = whole(node.type), np.asarray(weights.tensor(node.name))
    n, k = shape[0], shape[-1]
    match node.type.dtype:
        case DType.Q8:
            return unpack_q8(data[: packed_bytes(n, k, 8)], n, k)
        case DType.Q4:
            return unpack_q4(data[: packed_bytes(n, k, 4)], n, k)
        case DType.F8:
            size = f8_bytes(*shape) - 4 * shape[0]
            return F8(data[: shape[0] * shape[1]].reshape(shape).copy(), data[size : size + 4 * shape[0]].view(np.float32).copy())
        case DType.BF16:
            return from_bf16(data[: 2 * int(np.prod(shape))].view(np.uint16).reshape(shape))
        case DType.F16:
            return data[: 2 * int(np.prod(shape))].view(np.float16).reshape(shape).astype(np.float32)
    return data[: 4 * int(np.prod(shape))].view(np.float32).reshape(shape).copy()
