"""IR values of a GPU program, read back from the card while it runs launch by launch, and its weights as numbers: what the numerics of
`mlsdc bench gpu-check` compare with the reference interpreter. Needs neither triton nor a checkpoint."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.interpret_state import KvState, StepTree
from mlsdc.compiler.ops_kv import AppendKv
from mlsdc.compiler.ops_quant import AppendKvSlice
from mlsdc.compiler.quantise import A8, A16, F8, Q4, Q8
from mlsdc.compiler.types import GROUP, Dim, DType, KvType, TensorType
from mlsdc.runtime.device.cuda import CudaLevel
from mlsdc.runtime.device.cuda_program import CudaProgram
from mlsdc.runtime.kv_format import KvGeometry, from_bf16, to_bf16
from mlsdc.runtime.program import ArenaArg, Arg, InputArg, Launch, WeightArg
from mlsdc.runtime.step import Array, Header
from mlsdc.runtime.weight_files import LevelWeights
from mlsdc.targets.nvidia_layout import f8_bytes, packed_bytes, unpack_q4, unpack_q8
from mlsdc.targets.values import COUNTS, fine_of, whole
from mlsdc.templates.params_pages import chunk_of

Value = Array | A8 | A16 | KvState
RESULTS = ("y_ptr", "out_ptr")  # what kernels call the value they make


@dataclass(frozen=True)
class Ran:
    """A node that ran: the kernels that made its value (of a cache all that wrote it, in order), and a copy of the value."""

    node: str
    kernels: tuple[str, ...]
    value: Value


def run_launches(program: CudaProgram, graph: Graph, pages: SequencePages, wanted: Container[str]) -> Iterator[Ran]:
    """Run the program for what the step buffers say, one launch at a time; after the last of each wanted node its value, where this knows
    how it lies."""
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
        if bound.launch.node in graph.by_name and bound.launch.node in wanted:
            node = graph[bound.launch.node]
            if isinstance(node.type, KvType):
                pages.see(node, mine)
                yield Ran(node.name, tuple(launch.kernel for launch in mine), pages.state())
            else:
                found = ((one, read_value(level, graph, node, one)) for one in reversed(mine))
                if made := next(((one, value) for one, value in found if value is not None), None):
                    yield Ran(node.name, (made[0].kernel,), made[1])
        mine = []


@dataclass
class SequencePages:
    """The pages of a step's one sequence, as the reference interpreter has them: `count` of its tokens, then those of its drafted rows.

    Of a grouped format `recent` are the 16-bit forms of what `see` has seen (interpret_state.KvState), the cards' own wide pages not.
    """

    level: CudaLevel
    geometry: KvGeometry
    count: int
    recent: Array | None = field(init=False)

    def __post_init__(self) -> None:
        self.scratch = self.level.limits.scratch_pages(self.geometry.page_size)
        self.recent = KvState.empty(self.geometry, self.count + self.scratch).recent

    def tree(self) -> StepTree:
        """The step's, with these pages' places for the card's."""
        places = np.arange(self.count + self.scratch, dtype=np.int32)[None]
        tree = StepTree.from_buffers(self.level.buffers)
        return replace(tree, page_table=places[:, : self.count], scratch_table=places[:, self.count :])

    def state(self) -> KvState:
        """What the pages hold now."""
        level, geometry = self.level, self.geometry
        pages = level.buffers.page_table[0, : self.count].tolist()
        if not geometry.grouped:
            pages += level.buffers.scratch_table[0, : self.scratch].tolist()
        pool = np.zeros((self.count + self.scratch, geometry.page_bytes), np.uint8)
        for place, page in enumerate(pages):
            pool[place] = level.read_page(page)
        return KvState(geometry, pool, None if self.recent is None else self.recent.copy())

    def see(self, node: Node, launches: list[Launch]) -> None:
        """Of a grouped format: take over what a layer's rows are in 16 bits: committed ones in the arena, drafted ones in scratch pages."""
        arg = next((found for launch in launches if (found := argument(self.level, launch, "chunk")) is not None), None)
        if self.recent is None or not isinstance(arg, ArenaArg):
            return
        assert isinstance(node.op, AppendKv | AppendKvSlice)
        level, size, buffers = self.level, self.geometry.page_size, self.level.buffers
        chunk, wide = chunk_of(self.geometry), self.geometry.wide
        assert wide is not None
        rows = int(buffers.header[Header.ROWS])
        level.device.use()
        committed = level.device.download(level.arena + arg.arena, -(-rows // chunk.page_size) * chunk.page_bytes)
        pages: dict[int, Array] = {}
        for row in range(rows):
            slot = int(buffers.row_slot[row])
            if slot < 0:
                page, at = divmod(int(buffers.positions[row]), size)
                place, from_ = divmod(row, chunk.page_size)
                source, geometry, layer = committed[place * chunk.page_bytes :][: chunk.page_bytes], chunk, 0
            else:
                page, at = divmod(slot, size)
                place, from_ = divmod(slot, wide.page_size)
                if place not in pages:
                    pages[place] = wide_page(self.level, int(buffers.scratch_table[0, place]))
                page, source, geometry, layer = page + self.count, pages[place], wide, node.op.layer
            for head in range(geometry.num_kv_heads):
                for which, x in enumerate(geometry.read(source, layer, head)):
                    self.recent[page, node.op.layer, head, at, which] = to_bf16(x[from_])


def wide_page(level: CudaLevel, page: int) -> Array:
    """A wide page's bytes on the card."""
    level.device.use()
    return level.device.download(level.pool + page * level.wide_bytes, level.wide_bytes)


def argument(level: CudaLevel, launch: Launch, *names: str) -> Arg | None:
    """What a launch gives for the first parameter of one of these names; None if its kernel has none."""
    abi = level.device.kernel(launch.kernel).info.abi
    return next((arg for entry, arg in zip(abi, launch.args, strict=False) if entry.split(": ")[0] in names), None)


def bearers(ran: Iterable[Launch]) -> dict[str, str]:
    """Of each node the kernel, among those launched, that its bytes count for: the first that reads a weight (what quantises rows or sorts
    pairs before it does not), else the first."""
    found: dict[str, str] = {}
    for launch in sorted(ran, key=lambda launch: not any(isinstance(arg, WeightArg) for arg in launch.args)):
        found.setdefault(launch.node, launch.kernel)
    return found


def arena_of(level: CudaLevel, launch: Launch, *names: str) -> int:
    """Address of what a launch gives for the first parameter of one of these names, which is in the arena."""
    arg = argument(level, launch, *names)
    assert isinstance(arg, ArenaArg)
    return level.address(launch, arg)


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
