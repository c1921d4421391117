"""The cuda device: cubins of an artifact on one NVIDIA GPU, one synchronisation a step. cuda_program.py has the launch lists.

Memory is asked for in one piece for each level and one for the page pool, after all of it was compared with what is free. Step inputs
have fixed places on the GPU.
"""

from __future__ import annotations

import ctypes as C
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.base import BoundProgram, Device, LevelMemory
from mlsdc.runtime.device.binding import level_info, step_buffers
from mlsdc.runtime.device.cuda_driver import (
    FREE_SHARED,
    MAX_DYNAMIC_SHARED,
    NON_BLOCKING,
    SHARED_OPTIN,
    THREAD_LOCAL,
    Driver,
    branch_of,
    fits,
)
from mlsdc.runtime.device.cuda_list import CudaKernelList
from mlsdc.runtime.device.cuda_program import CudaProgram, CudaSample, aligned, input_places, used_inputs
from mlsdc.runtime.device.kernel_list import Block, KernelCall, KernelList
from mlsdc.runtime.errors import ArtifactError, DeviceError
from mlsdc.runtime.kernel_file import DEFAULT, Choice, Gpu, find, kernels_path
from mlsdc.runtime.levels.grown import AHEAD, MADE_THERE
from mlsdc.runtime.manifest import KernelInfo, KernelVariant, LevelInfo, TargetInfo
from mlsdc.runtime.program import ArenaArg, Arg, InputArg, Launch, PoolArg, ProgramSpec, TargetArenaArg, TargetInputArg, WeightArg
from mlsdc.runtime.step import INPUTS, Array, Header, Limits

if TYPE_CHECKING:
    from mlsdc.runtime.memory_plan import MemoryPlan

CHUNK = 64 << 20  # bytes of weights copied at a time


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel, or a `variant` of it."""

    info: KernelInfo
    function: C.c_void_p
    variant: KernelVariant | None = None


class CudaDevice(Device):
    """`target.device` is `cuda` or `cuda:1`. `threads` is for other devices."""

    def __init__(self, artifact: Artifact, target: TargetInfo, threads: int | None = None, driver: Driver | None = None) -> None:
        self.artifact = artifact
        self.target = target
        self.index = int(target.device.partition(":")[2] or 0)
        self.driver = Driver() if driver is None else driver
        self._modules: list[C.c_void_p] = []
        self._memory: list[int] = []
        self._pinned: list[C.c_void_p] = []
        self._context: C.c_void_p | None = None
        self._pool: tuple[int, int] | None = None
        self.first: CudaLevel | None = None  # the level that was loaded first: the artifact's target
        self.epoch = 0  # synchronisations so far
        self.graphs: list[C.c_void_p] = []
        self.weights: dict[str, dict[str, int]] = {}  # level -> tensor -> address
        handle = self.driver.device(self.index)
        self.gpu = self.driver.name(handle)
        self.name = f"{target.name} (cuda:{self.index}, {self.gpu})"
        capability = self.driver.capability(self.index)
        if not fits(target.requires, capability):
            raise DeviceError(f"target {target.name} is for {' '.join(target.requires)}, cuda:{self.index} ({self.gpu}) is sm_{capability}")
        self.driver.check_floor(branch_of(target), f"target {target.name}")
        self.key = Gpu(self.gpu, capability, self.driver.cuda_version)
        self._shared = self.driver.attribute(handle, SHARED_OPTIN)
        context = C.c_void_p()
        self.driver.cuDevicePrimaryCtxRetain(C.byref(context), handle)
        self._handle, self._context = handle, context
        self.stream = C.c_void_p()
        try:
            self.use()
            self.driver.cuStreamCreate(C.byref(self.stream), NON_BLOCKING)
            self.kernels = {key: self._load(key, info) for key, info in target.kernels.items()}
            self._variants: dict[tuple[str, str], Kernel] = {}
            self._choices: Mapping[str, tuple[Choice, ...]] = {}
        except BaseException:
            self.close()
            raise

    def use(self) -> None:
        """Make the GPU this thread's: steps may come from any thread."""
        self.driver.cuCtxSetCurrent(self._context)

    def take_kernels(self, path: Path | None = None) -> None:
        found, self.kernel_note = find(self.artifact, self.target, self.key, path)
        self._choices = found.kernels if found is not None else {}
        if found is None and (path or kernels_path(self.artifact.root)).is_file():
            logging.getLogger("mlsdc").warning("mlsdc: warning: kernels: %s", self.kernel_note)

    def _load(self, key: str, info: KernelInfo, variant: KernelVariant | None = None) -> Kernel:
        build = variant or info
        shared = build.resources["shared_bytes"]
        if shared > self._shared:
            raise DeviceError(f"kernel '{key}' asks for {shared} bytes of shared memory, {self.gpu} gives {self._shared}: compile for it")
        module, function = C.c_void_p(), C.c_void_p()
        self.driver.cuModuleLoadData(C.byref(module), self.artifact.path(build.file).read_bytes())
        self._modules.append(module)
        self.driver.cuModuleGetFunction(C.byref(function), module, build.entry.encode())
        if shared > FREE_SHARED:
            self.driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared)
        return Kernel(info, function, variant)

    def check_room(self, plan: MemoryPlan) -> None:
        self.use()
        free, of = self.driver.free_bytes()
        if plan.total > free:
            why = (f"cuda:{self.index} ({self.gpu}): {plan.total:,} bytes are needed, {free:,} of {of:,} are free: lower memory.kv_pool or "
                   "limits, or free the GPU")
            raise DeviceError("\n".join([why, *plan.table()]))

    def load_level(self, level: str, num_pages: int) -> CudaLevel:
        self.use()
        return CudaLevel(self, level, num_pages)

    def kernel_list(self, target: LevelMemory, blocks: Mapping[str, Block], calls: Sequence[KernelCall]) -> KernelList | None:
        if any(call.kernel not in self.kernels for call in calls):
            return None
        assert isinstance(target, CudaLevel)
        return CudaKernelList(self, target, blocks, calls)

    def kernel(self, key: str) -> Kernel:
        if key not in self.kernels:
            raise ArtifactError(f"target {self.target.name}: no kernel '{key}'; compile again")
        return self.kernels[key]

    def variant(self, key: str, name: str) -> Kernel:
        """Another build of a kernel, loaded when it is first wanted."""
        if (key, name) not in self._variants:
            info = self.target.kernels[key]
            self._variants[key, name] = self._load(f"{key}.{name}", info, info.variants[name])
        return self._variants[key, name]

    def chosen(self, key: str) -> list[tuple[int, Kernel]]:
        """The builds of a kernel to launch, by the most that a launch counts; by rising size."""
        return [(choice.size, self.kernel(key) if choice.build == DEFAULT else self.variant(key, choice.build))
                for choice in self._choices.get(key, ())]

    def reserve(self, level: str, parts: Mapping[str, int], pool_bytes: int) -> tuple[dict[str, int], int]:
        """Addresses of a level's parts, in one allocation, and of the pool, which the first level makes.

        Raises DeviceError, before anything is allocated, if it does not fit.
        """
        new_pool = pool_bytes if self._pool is None else 0
        if self._pool is not None and pool_bytes > self._pool[1]:
            raise DeviceError(f"kv pool: {pool_bytes} bytes wanted, {self._pool[1]} were allocated for the first level")
        wanted = {**parts, **({"kv pool": new_pool} if new_pool else {})}
        total = sum(aligned(size) for size in wanted.values())
        free, of = self.driver.free_bytes()
        if total > free:
            listed = ", ".join(f"{name} {size:,}" for name, size in wanted.items())
            raise DeviceError(
                f"cuda:{self.index} ({self.gpu}): level '{level}' needs {total:,} bytes ({listed}), {free:,} of {of:,} are free: lower "
                "memory.kv_pool or limits, or free the GPU")
        start = self.take(sum(aligned(size) for size in parts.values()))
        addresses = {}
        for name, size in parts.items():
            addresses[name] = start
            start += aligned(size)
        if self._pool is None and pool_bytes:
            self._pool = self.take(pool_bytes), pool_bytes
            self.driver.cuMemsetD8Async(C.c_uint64(self._pool[0]), C.c_ubyte(0), C.c_size_t(pool_bytes), self.stream)
        return addresses, self._pool[0] if self._pool else 0

    def take(self, num_bytes: int) -> int:
        """The address of so many bytes, freed by `close`. Raises DeviceError."""
        address = self.driver.allocate(num_bytes)
        self._memory.append(address)
        return address

    def pinned(self, num_bytes: int) -> Array:
        """Zeroed page-locked host memory, u8."""
        pointer = C.c_void_p()
        self.driver.cuMemHostAlloc(C.byref(pointer), C.c_size_t(max(1, num_bytes)), 0)
        self._pinned.append(pointer)
        assert pointer.value is not None
        memory: Array = np.frombuffer(memoryview((C.c_ubyte * max(1, num_bytes)).from_address(pointer.value)), np.uint8)
        memory[:] = 0
        return memory[:num_bytes]

    def upload(self, address: int, data: Array) -> None:
        """Copy host bytes to the GPU, and wait."""
        flat = data.reshape(-1).view(np.uint8)
        for start in range(0, len(flat), CHUNK):
            part = flat[start : start + CHUNK]
            self.driver.cuMemcpyHtoD_v2(C.c_uint64(address + start), C.c_void_p(part.ctypes.data), C.c_size_t(len(part)))

    def download(self, address: int, num_bytes: int) -> Array:
        """Copy bytes from the GPU, u8, after everything that was started."""
        data = np.empty(num_bytes, np.uint8)
        self.synchronise()
        self.driver.cuMemcpyDtoH_v2(C.c_void_p(data.ctypes.data), C.c_uint64(address), C.c_size_t(num_bytes))
        return data

    def synchronise(self) -> None:
        """Wait for everything that was started."""
        self.driver.cuStreamSynchronize(self.stream)
        self.epoch += 1

    @contextmanager
    def capturing(self) -> Iterator[C.c_void_p]:
        """What is started in it becomes a graph, whose handle is there once it has ended; `graphs` are destroyed by `close`."""
        graph, ready = C.c_void_p(), C.c_void_p()
        self.driver.cuStreamBeginCapture_v2(self.stream, THREAD_LOCAL)
        yield ready
        self.driver.cuStreamEndCapture(self.stream, C.byref(graph))
        self.driver.cuGraphInstantiateWithFlags(C.byref(ready), graph, C.c_uint64(0))
        self.driver.cuGraphDestroy(graph)

    def close(self) -> None:
        if self._context is None:
            return
        self.use()
        with suppress(DeviceError):  # what a step left running reads and writes what goes now; a GPU that broke down runs nothing
            self.synchronise()
        for graph in self.graphs:
            self.driver.cuGraphExecDestroy(graph)
        for pointer in self._pinned:
            self.driver.cuMemFreeHost(pointer)
        for address in self._memory:
            self.driver.cuMemFree_v2(C.c_uint64(address))
        for module in self._modules:
            self.driver.cuModuleUnload(module)
        self.driver.cuDevicePrimaryCtxRelease_v2(self._handle)
        self._context = None


class CudaLevel(LevelMemory):
    """A level's weights, arena and step inputs at fixed addresses on the GPU; its step buffers are host memory."""

    def __init__(self, device: CudaDevice, level: str, num_pages: int) -> None:
        info = level_info(device.artifact, level)
        specs = device.artifact.programs(level, device.target)
        self.device = device
        self.first = device.first = device.first or self
        self.num_pages = num_pages
        self.page_bytes = info.kv.page_bytes if info.kv else 0
        self.wide_bytes = info.kv.wide.page_bytes if info.kv and info.kv.wide else 0
        self.limits: Limits = device.artifact.manifest.limits
        self.buffers = step_buffers(device.artifact, info, specs)
        self.places, inputs_bytes = input_places({name: getattr(self.buffers, name).nbytes for name in INPUTS}, specs.values())
        runs = list(device.artifact.level_weights(level, device.target.name).runs())
        weights_bytes = sum(aligned(len(data)) for data, _ in runs)
        parts = {"weights": weights_bytes, "arena": max(spec.arena_bytes for spec in specs.values()), "inputs": inputs_bytes}
        addresses, self.pool = device.reserve(level, parts, num_pages * self.page_bytes)
        self.arena, self.inputs = addresses["arena"], addresses["inputs"]
        self.weights, at = self._lent(info), addresses["weights"]
        for data, places in runs:
            device.upload(at, data)
            self.weights |= {name: at + place for name, place in places.items()}
            at += aligned(len(data))
        device.weights[level] = self.weights
        self._behind = specs.get("follow")
        self.feeds: dict[str, CudaProgram] = {}  # by name: a result's copy goes where this program takes the input of that name from
        self.programs: dict[str, BoundProgram] = {}
        results = {name for spec in specs.values() for name in spec.taps}
        read = {name: results & used_inputs([spec]) for name, spec in specs.items()}
        for name in sorted(specs, key=lambda name: (not read[name], name)):  # those that are fed come first, `trees` the last of them
            self.programs[name] = program = (CudaSample if name == "sample" else CudaProgram)(self, specs[name])
            self.feeds |= dict.fromkeys(read[name], program)

    def brought(self, spec: ProgramSpec) -> set[str]:
        """Step inputs that a program brings to the GPU: those it reads, and `forward` also those of `follow`, which starts behind it. What
        a list behind that makes itself, it does not bring."""
        if spec.name == AHEAD:
            return used_inputs([spec]) - MADE_THERE
        if self._behind is None or spec.name not in ("forward", "follow"):
            return used_inputs([spec])
        return used_inputs([spec, self._behind]) if spec.name == "forward" else set()

    def _lent(self, info: LevelInfo) -> dict[str, int]:
        """Addresses of tensors that lie with the target's."""
        shared: Mapping[str, str] = info.params.get("shared") or {}
        target = self.device.weights.get(self.device.artifact.manifest.target_level.name, {})
        return {name: target[of] for name, of in shared.items()}

    def bring(self, name: str) -> None:
        self.device.use()
        self.device.synchronise()
        self.device.upload(self.inputs + self.places[name], getattr(self.buffers, name))

    def read_page(self, page: int) -> Array:
        self.device.use()
        return self.device.download(self.pool + page * self.page_bytes, self.page_bytes)

    def write_page(self, page: int, data: Array) -> None:
        self.device.use()
        self.device.synchronise()
        self.device.upload(self.pool + page * self.page_bytes, np.ascontiguousarray(data))

    def copy_page(self, source: int, target: int) -> None:
        self._copy(source, target, self.page_bytes)

    def copy_wide(self, source: int, target: int) -> None:
        self._copy(source, target, self.wide_bytes)

    def _copy(self, source: int, target: int, size: int) -> None:
        """Within the pool, behind everything that was started."""
        device = self.device
        device.use()
        device.driver.cuMemcpyDtoDAsync_v2(
            C.c_uint64(self.pool + target * size), C.c_uint64(self.pool + source * size), C.c_size_t(size), device.stream)

    def counts(self) -> dict[str, int]:
        """The step's counts by their words of the header."""
        return {word.name: int(self.buffers.header[word]) for word in Header}

    def address(self, launch: Launch, arg: Arg) -> int:
        """Of a pointer argument. Raises ArtifactError."""
        if isinstance(arg, WeightArg):
            if arg.weight not in self.weights:
                raise ArtifactError(f"%{launch.node}: weight '{arg.weight}' is not in the weight file; compile again")
            return self.weights[arg.weight]
        if isinstance(arg, ArenaArg):
            return self.arena + arg.arena
        if isinstance(arg, InputArg):
            return self.inputs + self.places[arg.input]
        if isinstance(arg, TargetInputArg):
            return self.first.inputs + self.first.places[arg.target_input]
        if isinstance(arg, TargetArenaArg):
            return self.first.arena + arg.target_arena
        assert isinstance(arg, PoolArg)
        return self.pool + arg.pool
