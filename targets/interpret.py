"""Device `interpret`: a GPU artifact's own sources, launch lists and arguments, executed by Triton's interpreter on the CPU. For tests.

The interpreter lives in a process of its own (interpret_worker.py): triton decides at import whether it interprets, and a kernel that
reads wildly kills its process, not the engine's. Both processes map one memory file. Its arrays lie between guard zones, so that a kernel
that writes out of bounds is found, and named. A step takes seconds where a GPU takes milliseconds.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.base import BoundProgram, Device, LevelMemory
from mlsdc.runtime.device.binding import level_info, step_buffers
from mlsdc.runtime.device.kernel_list import Block, KernelCall, KernelList
from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.manifest import TargetInfo
from mlsdc.runtime.program import ProgramSpec
from mlsdc.runtime.step import INPUTS, Array
from mlsdc.targets.interpret_list import InterpretKernelList

PAGE = mmap.PAGESIZE
GUARD = 256  # bytes of POISON around every array
POISON = 0xFF


class SharedMemory:
    """A memory file that grows; arrays in it are (offset, bytes), with a guard zone on each side."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("mlsdc-interpret")
        self._end = 0

    def arrays(self, sizes: Mapping[str, int]) -> tuple[dict[str, Array], dict[str, Any]]:
        """u8 arrays of these sizes in one new mapping, zeroed, and what the other process needs to find them."""
        at, places = GUARD, {}
        for name, size in sizes.items():
            places[name] = (at, size)
            at += -(-size // GUARD) * GUARD + GUARD
        length = -(-at // PAGE) * PAGE
        os.ftruncate(self.fd, self._end + length)
        whole = np.frombuffer(mmap.mmap(self.fd, length, offset=self._end), np.uint8)
        whole[:] = POISON
        found = {name: whole[start : start + size] for name, (start, size) in places.items()}
        for array in found.values():
            array[:] = 0
        described = {"offset": self._end, "length": length, "places": places}
        self._end += length
        return found, described

    def close(self) -> None:
        os.close(self.fd)


class Worker:
    """The interpreting process: one JSON request and one answer at a time."""

    def __init__(self, fd: int) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        command = [sys.executable, "-m", "mlsdc.targets.interpret_worker", str(fd)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment,
                                         pass_fds=(fd,), text=True)

    def ask(self, doing: str, **request: Any) -> dict[str, Any]:
        """The answer to {"do": doing, ...}. Raises DeviceError, also if the process is gone; `doing` of what it did last is named then."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps({"do": doing, **request}) + "\n")
            stdin.flush()
            line = stdout.readline()
            last = ""
            while line.startswith("#"):
                last, line = line[1:].strip(), stdout.readline()
        except (BrokenPipeError, ValueError):
            line, last = "", ""
        if not line:
            raise DeviceError(f"the interpreter's process ended ({self._how()}){': ' + last if last else ''}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DeviceError(answer["error"])
        return answer

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()
        self._errors.close()

    def _how(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return (f"signal {-code}" if code < 0 else f"exit code {code}") + (f", {said[-1]}" if said else "")


class InterpretDevice(Device):
    """`threads` is for other devices: the interpreter has one."""

    def __init__(self, artifact: Artifact, target: TargetInfo, threads: int | None = None) -> None:
        if foreign := next((key for key, info in target.kernels.items() if info.source.endswith(".cu")), None):
            raise DeviceError(f"device interpret runs Triton's kernels, '{foreign}' is CUDA C++: compile without kernels.attention=nvrtc")
        self.name = f"{target.name} (interpreted)"
        self.artifact = artifact
        self.target = target
        self.memory = SharedMemory()
        self.worker = Worker(self.memory.fd)
        self._pool: tuple[Array, dict[str, Any]] | None = None
        self._lists = 0
        try:
            self.worker.ask("open", artifact=str(artifact.root), target=target.name)
        except BaseException:
            self.close()
            raise

    def load_level(self, level: str, num_pages: int) -> InterpretLevel:
        return InterpretLevel(self, level, num_pages)

    def kernel_list(self, target: LevelMemory, blocks: Mapping[str, Block], calls: Sequence[KernelCall]) -> KernelList | None:
        if any(call.kernel not in self.target.kernels for call in calls):
            return None
        assert isinstance(target, InterpretLevel)
        self._lists += 1
        return InterpretKernelList(self, target, self._lists, blocks, calls)

    def kv_pool(self, num_bytes: int) -> tuple[Array, dict[str, Any]]:
        """The device's KV bytes; the first level to ask says how many. Raises DeviceError."""
        if self._pool is None:
            arrays, described = self.memory.arrays({"pool": num_bytes})
            self._pool = arrays["pool"], described
        if num_bytes > len(self._pool[0]):
            raise DeviceError(f"kv pool: {num_bytes} bytes wanted, {len(self._pool[0])} were allocated for the first level")
        return self._pool

    def close(self) -> None:
        if self.memory.fd >= 0:
            self.worker.close()
            self.memory.close()
            self.memory.fd = -1


class InterpretLevel(LevelMemory):
    """Step buffers, arena and pool in the shared file; weights are mapped by the worker."""

    def __init__(self, device: InterpretDevice, level: str, num_pages: int) -> None:
        info = level_info(device.artifact, level)
        specs = device.artifact.programs(level, device.target)
        self.device = device
        self.name = level
        self.num_pages = num_pages
        self.page_bytes = info.kv.page_bytes if info.kv else 0
        self.wide_bytes = info.kv.wide.page_bytes if info.kv and info.kv.wide else 0
        self.buffers = step_buffers(device.artifact, info, specs)
        self.pool, pool = np.zeros(0, np.uint8), None
        if info.kv:
            self.pool, pool = device.kv_pool(num_pages * self.page_bytes)
        own = {name: getattr(self.buffers, name) for name in INPUTS}
        arrays, inputs = device.memory.arrays({name: array.nbytes for name, array in own.items()})
        for name, array in own.items():
            setattr(self.buffers, name, arrays[name].view(array.dtype).reshape(array.shape))
        places, arena = device.memory.arrays({"arena": max(spec.arena_bytes for spec in specs.values())})
        self.arena = places["arena"]
        self.arena[:] = POISON
        device.worker.ask("level", level=level, pool=pool, inputs=inputs, arena=arena)
        self.programs: dict[str, BoundProgram] = {name: InterpretProgram(self, spec) for name, spec in specs.items()}

    def read_page(self, page: int) -> Array:
        return self.pool[page * self.page_bytes : (page + 1) * self.page_bytes].copy()

    def write_page(self, page: int, data: Array) -> None:
        self.pool[page * self.page_bytes : (page + 1) * self.page_bytes] = data

    def copy_wide(self, source: int, target: int) -> None:
        size = self.wide_bytes
        self.pool[target * size : (target + 1) * size] = self.pool[source * size : (source + 1) * size]


class InterpretProgram(BoundProgram):
    """A launch list that the worker runs, launch by launch."""

    def __init__(self, level: InterpretLevel, spec: ProgramSpec) -> None:
        self.name = spec.name
        self.spec = spec
        self.level = level

    def run(self) -> None:
        self._launch(0, len(self.spec.launches))

    def tap(self, name: str) -> Array:
        tap = self.spec.taps[name]
        size = 4 * int(np.prod(tap.shape))
        return self.level.arena[tap.arena : tap.arena + size].view(tap.dtype).reshape(tap.shape)

    def profile(self) -> list[tuple[str, str, float]]:
        """Microseconds of the interpreter, which say nothing of a GPU's."""
        times = []
        for i, launch in enumerate(self.spec.launches):
            start = time.perf_counter()
            self._launch(i, 1)
            times.append((launch.node, launch.kernel, (time.perf_counter() - start) * 1e6))
        return times

    def _launch(self, first: int, count: int) -> None:
        self.level.device.worker.ask("run", level=self.level.name, program=self.name, first=first, count=count)
