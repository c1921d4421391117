"""What a device is to the engine. `cpu` lives here, `cuda` comes beside it; neither compiles anything (law L5)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsdc.runtime.device.host_list import HostList
from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.step import Array, StepBuffers

if TYPE_CHECKING:
    from mlsdc.runtime.device.kernel_list import Block, KernelCall, KernelList
    from mlsdc.runtime.memory_plan import MemoryPlan

NativeFunction = Callable[..., Any]


class BoundProgram(ABC):
    """A program of one level, bound to a device's memory."""

    name: str

    @abstractmethod
    def run(self) -> None:
        """Run every launch for what the step buffers say now, and return when the results can be read. Raises DeviceError."""

    def start(self) -> None:
        """The first half of `run`, without waiting where the device can: other programs of the level may be run before `finish`."""
        self.run()

    def finish(self) -> None:
        """The second half: wait until the results can be read. Not needed if another program has run to its end since."""

    def feed(self, reader: BoundProgram, name: str) -> bool:
        """Run, before `reader` of the same level runs next. True: result `name` will be its step input of that name, without a wait in
        between, whatever the buffers say; else the caller copies it there."""
        self.run()
        return False

    @abstractmethod
    def tap(self, name: str) -> Array:
        """A host view of a named result (`logits` f32[max_logit_rows, vocab]); valid until the next run of any program of the level."""

    @abstractmethod
    def profile(self) -> list[tuple[str, str, float]]:
        """Run once, timing each launch: (node, kernel, microseconds)."""


class Watched(BoundProgram):
    """A program, and something that is told after each of its runs."""

    def __init__(self, program: BoundProgram, ran: Callable[[], None]) -> None:
        self.name = program.name
        self._program = program
        self._ran = ran

    def run(self) -> None:
        self._program.run()
        self._ran()

    def tap(self, name: str) -> Array:
        return self._program.tap(name)

    def profile(self) -> list[tuple[str, str, float]]:
        return self._program.profile()


class Timed(BoundProgram):
    """A program, and the time spent in it."""

    def __init__(self, program: BoundProgram) -> None:
        self.name = program.name
        self._program = program
        self._seconds = 0.0

    def run(self) -> None:
        start = time.perf_counter()
        self._program.run()
        self._seconds += time.perf_counter() - start

    def start(self) -> None:
        start = time.perf_counter()
        self._program.start()
        self._seconds += time.perf_counter() - start

    def finish(self) -> None:
        start = time.perf_counter()
        self._program.finish()
        self._seconds += time.perf_counter() - start

    def take(self) -> float:
        """Seconds in its runs since the last time."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def tap(self, name: str) -> Array:
        return self._program.tap(name)

    def profile(self) -> list[tuple[str, str, float]]:
        return self._program.profile()


class LevelMemory(ABC):
    """What one level owns on a device: weights, page pool, step buffers, programs.

    `page_bytes` and `wide_bytes` are of a page and of a wide page (runtime/wide_pages.py); 0 where the level has none.
    """

    buffers: StepBuffers
    programs: dict[str, BoundProgram]
    num_pages: int
    page_bytes: int = 0
    wide_bytes: int = 0

    @abstractmethod
    def read_page(self, page: int) -> Array:
        """Copy of a page's bytes, u8[page_bytes] (tests, `inspect`)."""

    @abstractmethod
    def write_page(self, page: int, data: Array) -> None:
        """Set a page's bytes (copy-on-write, poisoning of free pages in tests)."""

    def bring(self, name: str) -> None:
        """Make what the host has written into a kept step input (step.KEPT) the device's, where that is another memory. No step may be
        running."""
        return

    def copy_page(self, source: int, target: int) -> None:
        """After all that was started: a step may be running."""
        self.write_page(target, self.read_page(source))

    def copy_wide(self, source: int, target: int) -> None:
        """The same for wide pages."""
        raise DeviceError("this device has no wide pages: compile with a cache format of one token at a time, such as int8")


class Device(ABC):
    """Opened once per engine; `close` frees everything and stops its threads. Safe to call twice."""

    name: str
    kernel_note: str = ""  # where kernels have several builds: which are launched, and why

    def take_kernels(self, path: Path | None = None) -> None:
        """Before the first level is loaded: launch what `mlsdc tune` chose on this machine, by `path` or by the file beside the artifact,
        if it is there and of this artifact and machine. Raises ArtifactError for a broken one, DeviceError for a `path` where there is
        nothing to choose."""
        if path is not None:
            raise DeviceError(f"{path}: device {self.name} has no kernels to choose among")

    @abstractmethod
    def load_level(self, level: str, num_pages: int) -> LevelMemory:
        """Bind a level. All levels share the device's one KV pool, made for the first of them: page i lies at i * page_bytes of it.

        Who may write which page is the page pools' business (runtime/slabs.py). Raises ArtifactError, DeviceError.
        """

    def check_room(self, plan: MemoryPlan) -> None:
        """Before the first level is loaded: raises DeviceError, with the plan's table, if the device has not so much memory free."""
        return

    def native(self, name: str) -> NativeFunction | None:
        """A host function of the artifact's code, called with integers, floats and addresses; None if it has none of that name."""
        return None

    def host_list(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> HostList:
        """Calls of `native` functions that are made in one go (host_list.py). Raises DeviceError where there are none."""
        raise DeviceError(f"device {self.name}: has no host functions")

    def kernel_list(self, target: LevelMemory, blocks: Mapping[str, Block], calls: Sequence[KernelCall]) -> KernelList | None:
        """A level's own kernels behind the target's programs, bound at load; None where the artifact has none of these kernels for it.
        Raises ArtifactError, DeviceError."""
        return None

    @abstractmethod
    def close(self) -> None: ...
