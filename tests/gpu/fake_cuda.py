"""A driver library without a GPU: device memory is host memory, and everything a real driver would check or misbehave on is checked.

Work on a stream is done when somebody synchronises, not before, so that data which was changed too early shows. A launch's parameters are
read by the parameter table of its cubin; every pointer must lie in an allocation, at a multiple of 16. Graphs keep what was captured.
"""

from __future__ import annotations

import ctypes as C
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlsdc.targets.cubin import Param, params

OUT_OF_MEMORY, NO_DEVICE, INVALID_VALUE, INVALID_IMAGE, NO_BINARY, NOT_FOUND = 2, 100, 1, 200, 209, 500
NAMES = {OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY", NO_DEVICE: b"CUDA_ERROR_NO_DEVICE", INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
         INVALID_IMAGE: b"CUDA_ERROR_INVALID_IMAGE", NO_BINARY: b"CUDA_ERROR_NO_BINARY_FOR_GPU", NOT_FOUND: b"CUDA_ERROR_NOT_FOUND"}
SHARED_FREE = 48 * 1024


@dataclass
class Function:
    entry: str
    table: list[Param]
    image: bytes = field(repr=False)
    dynamic_shared: int = SHARED_FREE


@dataclass(frozen=True)
class Launched:
    """A kernel as the GPU would have run it: `values` are its parameters' bytes, the two hidden pointers included."""

    entry: str
    grid: int
    threads: int
    shared: int
    values: tuple[bytes, ...]
    image: bytes = field(default=b"", repr=False, compare=False)  # the cubin that it is of


@dataclass(frozen=True)
class TensorMap:
    """What a CUtensorMap was made of: sizes, strides in bytes (of all axes but the innermost) and box, innermost first."""

    element_type: int
    address: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


MAP_ELEMENTS = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)  # bytes of a CUtensorMapDataType
MAP_SPANS = {0: 1 << 30, 1: 32, 2: 64, 3: 128}  # bytes of a row of a box that a CUtensorMapSwizzle covers
Work = Callable[[], None]


def number(value: Any) -> int:
    return int(getattr(value, "value", value) or 0)


def put(pointer: Any, value: int) -> None:
    pointer._obj.value = value


@dataclass
class FakeCuda:
    """`execute(launched)` runs a kernel; without it launches are only recorded. `cost(launched)`: the microseconds that one takes by this
    GPU's clock, which events read; without it any two events are a microsecond apart."""

    sm: int = 90
    version: int = 12040
    free: int = 1 << 30
    devices: int = 1
    shared: int = 227 * 1024
    execute: Callable[[Launched], None] | None = None
    cost: Callable[[Launched], float] | None = None
    launched: list[Launched] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.host: dict[int, Any] = {}
        self.handles: dict[int, Any] = {}
        self.maps: dict[bytes, TensorMap] = {}
        self.queue: list[Work] = []
        self.capture: list[Work] | None = None
        self._next = itertools.count(0x1000)
        self.clock = 0.0  # microseconds of work done
        self.stamps: dict[int, float] = {}

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return found

        def call(*args: Any) -> Any:
            self.calls.append(name)
            return found(*args)

        return call

    # --- start ---

    def cuInit(self, flags: int) -> int:
        return 0 if self.devices else NO_DEVICE

    def cuDriverGetVersion(self, version: Any) -> int:
        put(version, self.version)
        return 0

    def cuGetErrorName(self, code: int, text: Any) -> int:
        put(text, NAMES.get(code, b"CUDA_ERROR_UNKNOWN"))
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        put(text, NAMES.get(code, b"unknown")[11:].replace(b"_", b" ").lower())
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        put(count, self.devices)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        put(device, index)
        return 0

    def cuDeviceGetName(self, text: Any, size: int, device: int) -> int:
        text.value = b"Fake GPU"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        put(value, {75: self.sm // 10, 76: self.sm % 10, 97: self.shared}[attribute])
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        put(context, self._handle("context"))
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> int:
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        return 0 if number(context) else INVALID_VALUE

    # --- memory ---

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        put(free, self.free)
        put(total, 1 << 30)
        return 0

    def cuMemAlloc_v2(self, pointer: Any, size: Any) -> int:
        if number(size) > self.free:
            return OUT_OF_MEMORY
        self.free -= number(size)
        put(pointer, self._new(self.memory, number(size), 0xFF))
        return 0

    def cuMemFree_v2(self, pointer: Any) -> int:
        return 0 if self.memory.pop(number(pointer), None) is not None else INVALID_VALUE

    def cuMemHostAlloc(self, pointer: Any, size: Any, flags: int) -> int:
        put(pointer, self._new(self.host, number(size), 0))
        return 0

    def cuMemFreeHost(self, pointer: Any) -> int:
        """Refused while anything is running: it may be copying there."""
        return 0 if not self.queue and self.host.pop(number(pointer), None) is not None else INVALID_VALUE

    def cuMemsetD8Async(self, target: Any, byte: Any, size: Any, stream: Any) -> int:
        return self._do(lambda: C.memset(number(target), number(byte), number(size)), [(target, size)])

    def cuMemcpyHtoD_v2(self, target: Any, source: Any, size: Any) -> int:
        if not self._on_gpu(number(target), number(size)):
            return INVALID_VALUE
        C.memmove(number(target), number(source), number(size))
        return 0

    def cuMemcpyDtoH_v2(self, target: Any, source: Any, size: Any) -> int:
        if not self._on_gpu(number(source), number(size)):
            return INVALID_VALUE
        C.memmove(number(target), number(source), number(size))
        return 0

    def cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        to, at, count = number(target), number(source), number(size)
        locked = any(start <= at and at + count <= start + len(block) for start, block in self.host.items())
        if locked:
            return self._do(lambda: C.memmove(to, at, count), [(target, size)])
        if self.capture is not None:
            return INVALID_VALUE  # a graph would read memory that may be gone
        data = C.string_at(at, count)
        return self._do(lambda: C.memmove(to, data, count), [(target, size)])

    def cuMemcpyDtoHAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        to, at, count = number(target), number(source), number(size)
        return self._do(lambda: C.memmove(to, at, count), [(source, size)])

    def cuMemcpyDtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        to, at, count = number(target), number(source), number(size)
        return self._do(lambda: C.memmove(to, at, count), [(target, size), (source, size)])

    # --- code ---

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:
        if image[:4] != b"\x7fELF":
            return INVALID_IMAGE
        if image[8] == 7 and image[48] != self.sm:  # e_flags of ABI 7 begin with the architecture
            return NO_BINARY
        put(module, self._handle(image))
        return 0

    def cuModuleUnload(self, module: Any) -> int:
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, entry: bytes) -> int:
        try:
            image = self.handles[number(module)]
            table = params(image, entry.decode())
        except ValueError:
            return NOT_FOUND
        put(function, self._handle(Function(entry.decode(), table, image)))
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        if attribute != 8 or value > self.shared:
            return INVALID_VALUE
        self.handles[number(function)].dynamic_shared = value
        return 0

    def cuLaunchKernel(self, function: Any, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: Any, arguments: Any,
                       extra: Any) -> int:
        f: Function = self.handles[number(function)]
        if shared > f.dynamic_shared or not 0 < gx < 2**31 or not 0 < bx <= 1024 or (gy, gz, by, bz) != (1, 1, 1, 1):
            return INVALID_VALUE
        if len(arguments) != len(f.table):
            return INVALID_VALUE  # a real driver would read past the array
        values = tuple(C.string_at(arguments[i], param.bytes) for i, param in enumerate(f.table))
        described = self._behind_maps(values)
        if described is None:
            return INVALID_VALUE
        for i, (param, value) in enumerate(zip(f.table, values, strict=True)):
            address = int.from_bytes(value, "little")
            hidden = i >= len(values) - 2
            if i in described:
                continue
            if param.bytes == 8 and (address != 0 if hidden else address % 16 or not self._on_gpu(address, 1)):
                return INVALID_VALUE
        launched = Launched(f.entry, gx, bx, shared, values, f.image)
        return self._do(lambda: self._run(launched), [])

    def cuTensorMapEncodeTiled(self, made: Any, element_type: Any, rank: Any, address: Any, sizes: Any, steps: Any, box: Any, every: Any,
                               interleave: Any, swizzle: Any, promotion: Any, outside: Any) -> int:
        """The limits of the driver API's documentation, for tensors that are not interleaved."""
        count, at = number(rank), number(address)
        found = TensorMap(number(element_type), at, tuple(sizes)[:count], tuple(steps)[: count - 1], tuple(box)[:count], number(swizzle))
        if not 1 <= count <= 5 or not len(sizes) == len(box) == len(every) == count or not 0 <= found.element_type < len(MAP_ELEMENTS):
            return INVALID_VALUE
        if C.addressof(made._obj) % 64 or C.sizeof(made._obj) != 128 or at % 16 or number(interleave) or number(promotion) not in range(4):
            return INVALID_VALUE
        size = MAP_ELEMENTS[found.element_type]
        reach = sum((n - 1) * step for n, step in zip(found.sizes, (size, *found.steps), strict=True)) + size
        if any(not 0 < n <= 2**32 for n in found.sizes) or any(step % 16 or not 0 < step < 2**40 for step in found.steps):
            return INVALID_VALUE
        if any(not 0 < n <= 256 for n in found.box) or tuple(every) != (1,) * count or not self._on_gpu(at, reach):
            return INVALID_VALUE
        if found.box[0] * size % 16 or found.box[0] * size > MAP_SPANS.get(found.swizzle, 0) or number(outside):
            return INVALID_VALUE
        value = len(self.maps).to_bytes(64, "little") + b"CUtensorMap".ljust(64, b"\0")
        self.maps[value] = found
        C.memmove(C.addressof(made._obj), value, 128)
        return 0

    def _behind_maps(self, values: Sequence[bytes]) -> set[int] | None:
        """Which parameters are tensor maps, and their tensors' sizes and strides behind them; None if these are not what was encoded."""
        found: set[int] = set()
        for i, value in enumerate(values):
            if len(value) != 128:
                continue
            if (made := self.maps.get(value)) is None:
                return None
            size = MAP_ELEMENTS[made.element_type]
            strides = [1, *(step // size for step in made.steps)]
            wanted = [n.to_bytes(4, "little") for n in reversed(made.sizes)] + [n.to_bytes(8, "little") for n in reversed(strides)]
            if list(values[i + 1 : i + 1 + len(wanted)]) != wanted:
                return None
            found.update(range(i, i + 1 + len(wanted)))
        return found

    def _run(self, launched: Launched) -> None:
        self.launched.append(launched)
        self.clock += self.cost(launched) if self.cost is not None else 0.0
        if self.execute is not None:
            self.execute(launched)

    # --- streams, graphs, events ---

    def cuStreamCreate(self, stream: Any, flags: int) -> int:
        put(stream, self._handle("stream"))
        return 0

    def cuStreamSynchronize(self, stream: Any) -> int:
        if self.capture is not None:
            return INVALID_VALUE
        queue, self.queue = self.queue, []
        for work in queue:
            work()
        return 0

    def cuStreamBeginCapture_v2(self, stream: Any, mode: int) -> int:
        self.capture = []
        return 0

    def cuStreamEndCapture(self, stream: Any, graph: Any) -> int:
        put(graph, self._handle(self.capture))
        self.capture = None
        return 0

    def cuGraphInstantiateWithFlags(self, ready: Any, graph: Any, flags: Any) -> int:
        put(ready, self._handle(list(self.handles[number(graph)])))
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        del self.handles[number(graph)]
        return 0

    def cuGraphExecDestroy(self, ready: Any) -> int:
        del self.handles[number(ready)]
        return 0

    def cuGraphLaunch(self, ready: Any, stream: Any) -> int:
        self.queue += self.handles[number(ready)]
        return 0

    def cuEventCreate(self, event: Any, flags: int) -> int:
        put(event, self._handle("event"))
        return 0

    def cuEventDestroy_v2(self, event: Any) -> int:
        return 0 if self.handles.pop(number(event), None) == "event" else INVALID_VALUE

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        if self.handles.get(number(event)) != "event":
            return INVALID_VALUE
        return self._do(lambda: self.stamps.update({number(event): self.clock}), [])

    def cuEventSynchronize(self, event: Any) -> int:
        return self.cuStreamSynchronize(None)

    def cuEventElapsedTime(self, ms: Any, begin: Any, end: Any) -> int:
        if not {number(begin), number(end)} <= self.stamps.keys():
            return INVALID_VALUE  # CUDA_ERROR_NOT_READY, as good as
        ms._obj.value = 0.001 if self.cost is None else (self.stamps[number(end)] - self.stamps[number(begin)]) / 1e3
        return 0

    # --- inside ---

    def _do(self, work: Work, touched: Sequence[tuple[Any, Any]]) -> int:
        """Put work on the stream, or into the graph that is being captured."""
        if not all(self._on_gpu(number(address), number(size)) for address, size in touched):
            return INVALID_VALUE
        (self.queue if self.capture is None else self.capture).append(work)
        return 0

    def _handle(self, thing: Any) -> int:
        handle = next(self._next)
        self.handles[handle] = thing
        return handle

    def _new(self, where: dict[int, Any], size: int, fill: int) -> int:
        """Host memory at a multiple of 256."""
        raw = np.full(size + 256, fill, np.uint8)
        start = -raw.ctypes.data % 256
        where[raw.ctypes.data + start] = raw[start : start + size]
        return int(raw.ctypes.data + start)

    def _on_gpu(self, address: int, size: int) -> bool:
        return self.block(address, size) is not None

    def block(self, address: int, size: int = 1) -> Any:
        """The allocation's bytes from `address` on."""
        for start, block in self.memory.items():
            if start <= address and address + size <= start + len(block):
                return block[address - start :]
        return None
