"""NVIDIA's driver API through ctypes: the functions that the cuda device calls, each checked, with errors that a person can act on.

ctypes, not cuda-bindings or cuda-core: a step is one graph launch, so that call overhead does not matter (2 us a launch, as fast as
cuda-bindings), it adds nothing to the base install (27 MB and 18 + 73 MB), and without a driver it fails at once with an error
(cuda-core's second call hangs). `MLSDC_LIBCUDA` names another library than libcuda.so.1.
"""

from __future__ import annotations

import ctypes as C
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.manifest import TargetInfo
from mlsdc.runtime.tensor_map import MAP_ALIGNMENT, MAP_BYTES, Tiles, strides

LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY, NO_DEVICE = 2, 100
# CUdevice_attribute and CUfunction_attribute
CC_MAJOR, CC_MINOR, SHARED_OPTIN = 75, 76, 97
MAX_DYNAMIC_SHARED = 8
FREE_SHARED = 48 * 1024  # dynamic shared memory that needs no opt-in
NON_BLOCKING = 1  # CUstream_flags
NO_INTERLEAVE, PROMOTE_128, ZEROS_OUTSIDE = 0, 2, 0  # CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapFloatOOBfill
THREAD_LOCAL = 1  # CUstreamCaptureMode: other threads' calls do not end a capture
# oldest driver branch -> the CUDA version it reports, 1000 * major + 10 * minor
DRIVER_CUDA = {525: 12000, 580: 13000}


class NoGpu(DeviceError):
    """This machine has no NVIDIA driver, or no GPU."""


class Driver:
    """A loaded driver library. `driver.cuMemAlloc_v2(...)` calls it and raises DeviceError unless it says CUDA_SUCCESS."""

    def __init__(self, library: Any = None) -> None:
        self._library = load_library() if library is None else library
        self._functions: dict[str, Any] = {}
        code = self._library.cuInit(0)
        if code:
            raise (NoGpu if code == NO_DEVICE else DeviceError)(self._refusal(code))
        version = C.c_int()
        self.cuDriverGetVersion(C.byref(version))
        self.cuda_version = version.value

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise DeviceError(f"the NVIDIA driver has no {name}: it is too old; drivers from {min(DRIVER_CUDA)} on have") from None

        def call(*args: Any) -> None:
            code = function(*args)
            if code:
                of_gpu = code == OUT_OF_MEMORY and "Host" not in name  # page-locked memory is the machine's
                room = ": lower memory.kv_pool or limits, or free the GPU" if of_gpu else ""
                raise DeviceError(f"{name}: {self.error(code)}{room}")

        self.__dict__[name] = call
        return call

    def error(self, code: int) -> str:
        """`CUDA_ERROR_OUT_OF_MEMORY (out of memory)`"""
        texts = []
        for function in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            text = C.c_char_p()
            function(code, C.byref(text))
            texts.append((text.value or b"?").decode(errors="replace"))
        return f"{texts[0]} ({texts[1]})"

    def num_devices(self) -> int:
        count = C.c_int()
        self.cuDeviceGetCount(C.byref(count))
        return count.value

    def device(self, index: int) -> int:
        """Handle of a GPU. Raises DeviceError."""
        count = self.num_devices()
        if not 0 <= index < count:
            raise DeviceError(f"device 'cuda:{index}': this machine has {count} GPU{'s' if count != 1 else ''}")
        handle = C.c_int()
        self.cuDeviceGet(C.byref(handle), index)
        return handle.value

    def attribute(self, device: int, attribute: int) -> int:
        value = C.c_int()
        self.cuDeviceGetAttribute(C.byref(value), attribute, device)
        return value.value

    def capability(self, index: int) -> int:
        """90 for compute capability 9.0. Raises DeviceError."""
        device = self.device(index)
        return 10 * self.attribute(device, CC_MAJOR) + self.attribute(device, CC_MINOR)

    def name(self, device: int) -> str:
        text = C.create_string_buffer(256)
        self.cuDeviceGetName(text, len(text), device)
        return text.value.decode(errors="replace")

    def check_floor(self, branch: int, what: str) -> None:
        """Raises DeviceError if the driver is older than the branch (525, 580) that loads `what`."""
        wanted = DRIVER_CUDA[branch]
        if self.cuda_version < wanted:
            raise DeviceError(
                f"the NVIDIA driver speaks CUDA {cuda_text(self.cuda_version)}, {what} needs CUDA {cuda_text(wanted)} (driver {branch} or "
                "newer): update the driver")

    def free_bytes(self) -> tuple[int, int]:
        """(free, total) of the current context's GPU."""
        free, total = C.c_size_t(), C.c_size_t()
        self.cuMemGetInfo_v2(C.byref(free), C.byref(total))
        return free.value, total.value

    def allocate(self, num_bytes: int) -> int:
        """Device memory. Raises DeviceError."""
        pointer = C.c_uint64()
        try:
            self.cuMemAlloc_v2(C.byref(pointer), C.c_size_t(max(1, num_bytes)))
        except DeviceError as error:
            raise DeviceError(f"{num_bytes:,} bytes of the GPU, of which {self.free_bytes()[0]:,} are free: {error}") from None
        return pointer.value

    def tensor_map(self, address: int, shape: Sequence[int], tiles: Tiles) -> Any:
        """A CUtensorMap of a dense tensor in device memory: 128 bytes at a multiple of 64, a launch's parameter by value."""
        room = (C.c_byte * (MAP_BYTES + MAP_ALIGNMENT))()
        made = (C.c_byte * MAP_BYTES).from_buffer(room, -C.addressof(room) % MAP_ALIGNMENT)  # keeps `room`
        rank = len(shape)
        sizes = (C.c_uint64 * rank)(*reversed(shape))  # innermost first, as all that follows
        steps = (C.c_uint64 * max(1, rank - 1))(*(step * tiles.element_bytes for step in reversed(strides(shape)[:-1])))
        box = (C.c_uint32 * rank)(*reversed(tiles.box))
        every = (C.c_uint32 * rank)(*[1] * rank)
        self.cuTensorMapEncodeTiled(
            C.byref(made), C.c_int(tiles.element_type), C.c_uint32(rank), C.c_void_p(address), sizes, steps, box, every,
            C.c_int(NO_INTERLEAVE), C.c_int(tiles.swizzle), C.c_int(PROMOTE_128), C.c_int(ZEROS_OUTSIDE))
        return made

    @contextmanager
    def events(self) -> Iterator[tuple[C.c_void_p, C.c_void_p]]:
        """Two events of the current context, for the time between them; destroyed at the end."""
        made: list[C.c_void_p] = []
        try:
            for _ in range(2):
                event = C.c_void_p()
                self.cuEventCreate(C.byref(event), 0)
                made.append(event)
            yield made[0], made[1]
        finally:
            for event in made:
                self.cuEventDestroy_v2(event)

    def _refusal(self, code: int) -> str:
        if code == NO_DEVICE:
            return "the NVIDIA driver finds no GPU: is it passed into this container (--gpus all), is CUDA_VISIBLE_DEVICES empty?"
        return f"the NVIDIA driver does not start: {self.error(code)}"


def load_library() -> C.CDLL:
    """libcuda. Raises NoGpu where there is none, DeviceError for a library that is another."""
    name = os.environ.get("MLSDC_LIBCUDA", LIBRARY)
    try:
        library = C.CDLL(name)
    except OSError as error:
        raise NoGpu(f"no NVIDIA driver: cannot load {name} ({error}); run where one is installed, or compile for a CPU") from None
    if not hasattr(library, "cuInit"):
        raise DeviceError(f"{name} (MLSDC_LIBCUDA) is no NVIDIA driver: it has no cuInit")
    return library


def cuda_text(version: int) -> str:
    """12040 -> `12.4`"""
    return f"{version // 1000}.{version % 1000 // 10}"


def choose(targets: Sequence[TargetInfo], index: int, driver: Driver | None = None) -> TargetInfo:
    """The target whose code is closest to GPU `index`, of those that its driver loads: its own architecture's before an older one's.
    Raises DeviceError."""
    driver = Driver() if driver is None else driver
    capability = driver.capability(index)
    fitting = [target for target in targets if fits(target.requires, capability)]
    if not fitting:
        built = ", ".join(f"{target.name} ({' '.join(target.requires)})" for target in targets)
        raise DeviceError(f"built for {built}, cuda:{index} ({driver.name(driver.device(index))}) is sm_{capability}: compile for it")
    closest = max(fitting, key=lambda target: (driver.cuda_version >= DRIVER_CUDA[branch_of(target)], target.requires))
    driver.check_floor(branch_of(closest), f"target {closest.name}")
    return closest


def branch_of(target: TargetInfo) -> int:
    """The oldest driver branch that loads all of a target's code."""
    return max((kernel.resources["min_driver"] for kernel in target.kernels.values()), default=min(DRIVER_CUDA))


def fits(requires: tuple[str, ...], capability: int) -> bool:
    """Whether code for `sm_90` runs on a GPU. From 9.0 on code is for one architecture; before, newer minor versions run older code."""
    for requirement in requires:
        sm = int(requirement.removeprefix("sm_"))
        if sm != capability and (sm >= 90 or sm // 10 != capability // 10 or sm > capability):
            return False
    return True
