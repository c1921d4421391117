"""The CPU device: loads an artifact's shared library through tvm-ffi, binds launch lists to addresses, and owns the worker threads.

Nothing here computes: kernels and the walker that runs a launch list are native code of the artifact (templates/llvm/walker.ll.jinja says
what a launch and the pool look like in memory).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.base import BoundProgram, Device, LevelMemory
from mlsdc.runtime.device.binding import level_info, step_buffers, weight_tensors
from mlsdc.runtime.device.host_list import ERROR, FLOAT, INT, LAUNCH_WORDS, POINTER, HostList
from mlsdc.runtime.errors import ArtifactError, DeviceError
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.manifest import TargetInfo
from mlsdc.runtime.program import ArenaArg, Arg, FloatArg, InputArg, IntArg, Launch, PoolArg, ProgramSpec, WeightArg
from mlsdc.runtime.step import Array, Header, aligned

ENTRY = "__tvm_ffi_"
THREADS = 48
HUGE_PAGE = 2 << 20
MAX_THREADS = 256


def pool_words(threads: int) -> int:
    """i64 words of the walker's pool (templates/llvm/walker.ll.jinja)."""
    return 64 + 16 * threads


def import_tvm_ffi() -> Any:
    """tvm-ffi, kept from importing torch (a second or more, and law L5): it does so whenever torch is installed."""
    if "tvm_ffi" in sys.modules or "torch" in sys.modules:
        import tvm_ffi

        return tvm_ffi
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tvm_ffi
    finally:
        del sys.modules["torch"]
    return tvm_ffi


def big_array(num_bytes: int) -> Array:
    """Zeroed u8 memory of its own mapping, in huge pages where the system gives them; untouched pages cost nothing."""
    size = -(-max(num_bytes, 1) // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise DeviceError(f"cannot allocate {num_bytes} bytes: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages: ordinary pages do
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    return whole[start : start + num_bytes]


class CpuDevice(Device):
    """`threads` compute threads (the caller's own and threads - 1 workers); default: the CPUs this process may use."""

    def __init__(self, artifact: Artifact, target: TargetInfo, threads: int | None = None) -> None:
        count = len(os.sched_getaffinity(0)) if threads is None else threads
        if not 1 <= count <= MAX_THREADS:
            raise DeviceError(f"threads: {count}, expected 1..{MAX_THREADS}")
        self.name = target.name
        self.threads = count
        self.artifact = artifact
        self.target = target
        libraries = {kernel.file for kernel in target.kernels.values()}
        if len(libraries) != 1:
            raise ArtifactError(f"target {target.name}: expected one kernel library, found {len(libraries)}; compile again")
        path = str(artifact.path(libraries.pop()))
        tvm_ffi = import_tvm_ffi()
        try:
            self._module = tvm_ffi.load_module(path)
            self._library = ctypes.CDLL(path)  # the same mapping: kernel addresses for launch lists
        except (OSError, RuntimeError) as error:
            raise ArtifactError(f"{path}: cannot be loaded ({str(error).strip().splitlines()[-1]}); compile again") from None
        self.launch_list: Callable[[int, int, int, int], Any] = self._function("mlsdc_run")
        self.pool = aligned((pool_words(count),), "i8")
        self.pool[THREADS] = count
        self._kv: Array | None = None
        serve = self._function("mlsdc_worker")
        self._stop = self._function("mlsdc_stop")
        self._workers = [
            threading.Thread(target=serve, args=(self.pool.ctypes.data, i), name=f"mlsdc-worker-{i}", daemon=True) for i in range(1, count)]
        for worker in self._workers:
            worker.start()

    def _function(self, name: str) -> Any:
        function = self._module.get_function(name)
        if function is None:
            raise ArtifactError(f"target {self.name}: the library has no '{name}'; compile again")
        return function

    def address(self, kernel: str) -> int:
        """Of a kernel's entry. Raises ArtifactError."""
        info = self.target.kernels.get(kernel)
        if info is None:
            raise ArtifactError(f"target {self.name}: no kernel '{kernel}'; compile again")
        try:
            function = getattr(self._library, ENTRY + info.entry)
        except AttributeError:
            raise ArtifactError(f"{info.file}: has no kernel '{kernel}'; compile again") from None
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    def native(self, name: str) -> Any:
        return self._function(name) if name in self.target.kernels else None

    def host_list(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> HostList:
        return HostList(self.launch_list, self.pool, self.address, calls)

    def load_level(self, level: str, num_pages: int) -> CpuLevel:
        return CpuLevel(self, level, num_pages)

    def program(self, level: CpuLevel, spec: ProgramSpec) -> CpuProgram:
        """A program of a level, bound to its memory."""
        return CpuProgram(level, spec)

    def kv_pool(self, num_bytes: int) -> Array:
        """The device's KV bytes, u8; the first level to ask says how many. Raises DeviceError."""
        if self._kv is None:
            self._kv = big_array(num_bytes)
        if num_bytes > len(self._kv):
            raise DeviceError(f"kv pool: {num_bytes} bytes wanted, {len(self._kv)} were allocated for the first level")
        return self._kv

    def close(self) -> None:
        if self._workers:
            self._stop(self.pool.ctypes.data)
            for worker in self._workers:
                worker.join()
            self._workers = []


class CpuLevel(LevelMemory):
    """Weights (memory-mapped), page pool, step buffers and one arena that all programs of the level share."""

    def __init__(self, device: CpuDevice, level: str, num_pages: int) -> None:
        info = level_info(device.artifact, level)
        self.device = device
        self.num_pages = num_pages
        specs = device.artifact.programs(level, device.target)
        self.buffers = step_buffers(device.artifact, info, specs)
        self.pool = device.kv_pool(num_pages * info.kv.page_bytes) if info.kv else np.zeros(0, np.uint8)
        if info.kv is not None:
            self.geometry: KvGeometry = info.kv
            self.page_bytes = info.kv.page_bytes
            self.wide_bytes = info.kv.wide.page_bytes if info.kv.wide else 0
        self.weights: Mapping[str, Array] = weight_tensors(device.artifact, info, device.target.name)
        self.arena = big_array(max(spec.arena_bytes for spec in specs.values()))
        self.programs: dict[str, BoundProgram] = {name: device.program(self, spec) for name, spec in specs.items()}

    def read_page(self, page: int) -> Array:
        return self._page(page).copy()

    def write_page(self, page: int, data: Array) -> None:
        self._page(page)[:] = data

    def copy_wide(self, source: int, target: int) -> None:
        size = self.wide_bytes
        self.pool[target * size : (target + 1) * size] = self.pool[source * size : (source + 1) * size]

    def _page(self, page: int) -> Array:
        size = self.geometry.page_bytes
        return self.pool[page * size : (page + 1) * size]


class CpuProgram(BoundProgram):
    """A launch list in the walker's format. Addresses are fixed here, once."""

    def __init__(self, level: CpuLevel, spec: ProgramSpec) -> None:
        self.name = spec.name
        self.spec = spec
        self.level = level
        self._args = [self._bind(launch) for launch in spec.launches]
        self.launches = aligned((max(1, len(spec.launches)), LAUNCH_WORDS), "i8")
        for row, launch, args in zip(self.launches, spec.launches, self._args, strict=False):
            if launch.over or launch.upto:
                raise ArtifactError(f"%{launch.node}: {launch.kernel} is for some counts only, and a CPU runs every launch; compile again")
            word = -1 if launch.count is None else int(Header[launch.count])
            row[:6] = level.device.address(launch.kernel), args.ctypes.data, len(args), launch.grid, word, launch.grain
        self._taps = {name: self._view(tap.arena, tap.dtype, tap.shape) for name, tap in spec.taps.items()}
        self._call = (level.device.pool.ctypes.data, self.launches.ctypes.data, len(spec.launches), level.buffers.header.ctypes.data)

    def run(self) -> None:
        self.level.device.launch_list(*self._call)
        self.check(0)

    def check(self, first: int) -> None:
        """Raises DeviceError if one of the launches that just ran, from `first` on, refused its arguments."""
        device = self.level.device
        if device.pool[ERROR]:
            launch = self.spec.launches[first + int(device.pool[ERROR]) - 1]
            raise DeviceError(f"program '{self.name}': kernel '{launch.kernel}' of %{launch.node} refused its arguments; compile again")

    def tap(self, name: str) -> Array:
        return self._taps[name]

    def profile(self) -> list[tuple[str, str, float]]:
        device, header = self.level.device, self.level.buffers.header.ctypes.data
        times = []
        for i, launch in enumerate(self.spec.launches):
            start = time.perf_counter()
            device.launch_list(device.pool.ctypes.data, self.launches[i].ctypes.data, 1, header)
            times.append((launch.node, launch.kernel, (time.perf_counter() - start) * 1e6))
        return times

    def _view(self, offset: int, dtype: str, shape: Sequence[int]) -> Array:
        size = int(np.prod(shape)) * 4
        return self.level.arena[offset : offset + size].view(dtype).reshape(shape)

    def _bind(self, launch: Launch) -> Array:
        """tvm-ffi's argument array: (type index, padding, value) a word pair; the walker sets the first two, the task range."""
        args = aligned((2 + len(launch.args), 2), "i8")
        args[:2, 0] = INT
        for row, arg in zip(args[2:], launch.args, strict=True):
            kind, value = self._value(launch, arg)
            row[0] = kind
            row[1:2].view("f8" if kind == FLOAT else "i8")[0] = value
        return args

    def _value(self, launch: Launch, arg: Arg) -> tuple[int, int | float]:
        level = self.level
        if isinstance(arg, WeightArg):
            if arg.weight not in level.weights:
                raise ArtifactError(f"%{launch.node}: weight '{arg.weight}' is not in the weight file; compile again")
            return POINTER, level.weights[arg.weight].ctypes.data
        if isinstance(arg, ArenaArg):
            return POINTER, level.arena.ctypes.data + arg.arena
        if isinstance(arg, PoolArg):
            return POINTER, level.pool.ctypes.data + arg.pool
        if isinstance(arg, InputArg):
            return POINTER, getattr(level.buffers, arg.input).ctypes.data
        if isinstance(arg, FloatArg):
            return FLOAT, arg.float
        assert isinstance(arg, IntArg)
        return INT, arg.int
