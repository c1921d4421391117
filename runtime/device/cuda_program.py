"""Launch lists on an NVIDIA GPU: arguments bound to addresses once, each program captured as CUDA graphs.

A graph is made for each bucket of rows, at load. It begins with copies from a program's own page-locked copy of the step inputs (so that
the host may write the next step's while the GPU reads these) and ends with the copies of what it chose and what levels read: whoever
has waited for a program waits for nothing more.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlsdc.runtime.device.base import BoundProgram
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.program import Arg, FloatArg, InputArg, IntArg, Launch, ProgramSpec, Tap, TensorMapArg
from mlsdc.runtime.sampling import record
from mlsdc.runtime.step import INPUTS, KEPT, Array, Header, Limits
from mlsdc.runtime.tensor_map import strides, tiles_of

if TYPE_CHECKING:
    from mlsdc.runtime.device.cuda import CudaDevice, CudaLevel, Kernel

ALIGNMENT = 256
RESULTS = ("choices", "logprob_ids", "logprobs", "grown")  # step inputs that programs write
SPARSE = {"bias_ids": record.NUM_BIAS, "bias": record.NUM_BIAS, "ban_ids": record.NUM_BANS, "seen_ids": record.NUM_SEEN,
          "seen_counts": record.NUM_SEEN}  # of a sequence only the first entries are used, as many as this word of its record says


@dataclass(frozen=True)
class Build:
    """A build of a kernel as one launch runs it: `grid` programs for each `grain` of what it counts, `most` at most."""

    function: C.c_void_p
    threads: int
    shared_bytes: int
    grid: int
    grain: int
    most: int

    @staticmethod
    def of(kernel: Kernel, launch: Launch) -> Build:
        variant, r = kernel.variant, (kernel.variant or kernel.info).resources
        tile = (variant.grid, variant.grain) if variant is not None and variant.grid else (launch.grid, launch.grain)
        return Build(kernel.function, r["threads"], r["shared_bytes"], *tile, r.get("most_programs", 2**31 - 1))


class BoundLaunch:
    """A launch's arguments as the driver reads them: values, and pointers to them; and the builds of its kernel, by what it counts."""

    def __init__(self, level: CudaLevel, launch: Launch) -> None:
        self.launch = launch
        self.kernel = level.device.kernel(launch.kernel)
        info = self.kernel.info
        types = [entry.split(": ")[1] for entry in info.abi]
        given = len(types) - types.count("null")
        if given != len(launch.args):
            raise ArtifactError(
                f"%{launch.node}: kernel '{launch.kernel}' takes {given} arguments, the launch has {len(launch.args)}; compile again")
        self._values = [part for arg, type_ in zip(launch.args, types, strict=False) for part in values(level, launch, arg, type_)]
        self._values += [C.c_uint64(0)] * types.count("null")  # Triton's scratch pointers
        self.params = (C.c_void_p * len(self._values))(*(C.addressof(v) for v in self._values))
        self.default = Build.of(self.kernel, launch)
        self.chosen = [(size, Build.of(kernel, launch)) for size, kernel in level.device.chosen(launch.kernel)]

    def build(self, header: Mapping[str, int]) -> Build:
        """What is launched for counts of the header: the build that was chosen for the smallest size that holds them."""
        count = 1 if self.launch.count is None else header[self.launch.count]
        return next((build for size, build in self.chosen if count <= size), self.default)

    def programs(self, header: Mapping[str, int], build: Build | None = None) -> int:
        """Programs for counts of the header."""
        launch, build = self.launch, build or self.build(header)
        if launch.count is not None and not launch.runs(header[launch.count]):
            return 0
        wanted = build.grid * (1 if launch.count is None else -(-header[launch.count] // build.grain))
        return min(wanted, build.most)

    def enqueue(self, device: CudaDevice, header: Mapping[str, int], build: Build | None = None) -> None:
        build = build or self.build(header)
        if count := self.programs(header, build):
            device.driver.cuLaunchKernel(
                build.function, count, 1, 1, build.threads, 1, 1, build.shared_bytes, device.stream, self.params, None)


def values(level: CudaLevel, launch: Launch, arg: Arg, type_: str) -> list[Any]:
    """An argument's parameters in memory: one, of a tensor map several. Raises ArtifactError as `value` does."""
    tiles = tiles_of(type_)
    if tiles is None or not isinstance(arg, TensorMapArg):
        return [value(level, launch, arg, type_)]
    address, shape = level.address(launch, arg.map.of), arg.map.shape
    if why := tiles.unfit(shape, address):
        raise ArtifactError(f"%{launch.node}: '{launch.kernel}' reads {arg.map} by tiles of {list(tiles.shape)}: {why}; compile again")
    return [level.device.driver.tensor_map(address, shape, tiles), *map(C.c_int32, shape), *map(C.c_int64, strides(shape))]


def value(level: CudaLevel, launch: Launch, arg: Arg, type_: str) -> C.c_uint64 | C.c_int64 | C.c_int32 | C.c_float:
    """One argument in memory. Raises ArtifactError where the artifact's argument is not of the kernel's type."""
    if type_.startswith("*") and not isinstance(arg, IntArg | FloatArg | TensorMapArg):
        address = level.address(launch, arg)
        if address % 16:
            raise ArtifactError(
                f"%{launch.node}: an argument of '{launch.kernel}' lies at {address:#x}, not at a multiple of 16; compile again")
        return C.c_uint64(address)
    if type_ in ("i32", "i64") and isinstance(arg, IntArg):
        return C.c_int32(arg.int) if type_ == "i32" else C.c_int64(arg.int)
    if type_ == "f32" and isinstance(arg, FloatArg):
        return C.c_float(arg.float)
    raise ArtifactError(f"%{launch.node}: kernel '{launch.kernel}' wants {type_}, the launch gives {arg}; compile again")


class CudaProgram(BoundProgram):
    """A launch list as one graph for each bucket of rows. A run copies the inputs aside, launches a graph, and waits in `finish`."""

    def __init__(self, level: CudaLevel, spec: ProgramSpec) -> None:
        self.name = spec.name
        self.spec = spec
        self.level = level
        self.device = level.device
        self.launches = [BoundLaunch(level, launch) for launch in spec.launches]
        used = used_inputs([spec])
        self.results = [name for name in RESULTS if name in used]
        self._grows = "growth" in used
        self._reads = [name for name in level.places if name in level.brought(spec) and name not in (*RESULTS, *KEPT)]
        self._staged = {name: level.device.pinned(getattr(level.buffers, name).nbytes) for name in self.results}
        self._taps = {name: self._readers_block(name, tap) for name, tap in spec.taps.items() if name != "logits"}  # few ask for logits
        self._runs = self._contiguous()
        self._copies = [(name, block[offset : offset + array.nbytes], array.reshape(-1).view(np.uint8), array[:1].nbytes * is_wide(name))
                        for block, arrays in self._runs for name, offset, array in arrays]
        self._fed: set[str] = set()  # inputs of the next run that another program's copies bring
        self._graphs: dict[tuple[int, ...], C.c_void_p] = {}
        self._started = False
        self._epoch = -1  # of the device at the last start: its copies were read once the device has synchronised since
        for bucket in self._buckets():
            self._graphs[bucket] = self._capture(bucket)

    @property
    def counts(self) -> list[str]:
        """Header words that the launches' grids depend on."""
        return [name for name in ("ROWS", "OUT", "COMMITS", "GROUPS") if any(launch.count == name for launch in self.spec.launches)]

    def run(self) -> None:
        self.start()
        self.finish()

    def start(self) -> None:
        """Copy the inputs aside and launch, without waiting."""
        self.device.use()
        if self._epoch == self.device.epoch:
            self.device.synchronise()
        rows = int(self.level.buffers.header[Header.ROWS])
        for name, aside, array, row_bytes in self._copies:
            if name not in self._fed:
                size = rows * row_bytes if row_bytes else len(aside)
                aside[:size] = array[:size]
        self._fed.clear()
        graph = self._graphs[self._bucket()]
        self.device.driver.cuGraphLaunch(graph, self.device.stream)
        self._started, self._epoch = True, self.device.epoch

    def feed(self, reader: BoundProgram, name: str) -> bool:
        if not isinstance(reader, CudaProgram) or self.level.feeds.get(name) is not reader:
            return super().feed(reader, name)
        self.start()
        reader._fed.add(name)
        return True

    def finish(self) -> None:
        """Wait until the GPU is done, unless somebody has since the start, and take the results over. Programs without results (`commit`)
        are not waited for."""
        if not self._started or not self.results:
            return
        self._started = False
        if self._epoch == self.device.epoch:
            self.device.synchronise()
        for name, staged in self._staged.items():
            array = getattr(self.level.buffers, name)
            array.reshape(-1).view(np.uint8)[:] = staged

    def tap(self, name: str) -> Array:
        tap = self.spec.taps[name]
        self.device.use()
        if name in self._taps:
            if self._epoch == self.device.epoch:
                self.device.synchronise()
            return self._taps[name].view(tap.dtype).reshape(tap.shape)
        data = self.device.download(self.level.arena + tap.arena, tap.num_bytes)
        return data.view(tap.dtype).reshape(tap.shape)

    def profile(self) -> list[tuple[str, str, float]]:
        """Each launch between two events, for what the step buffers say."""
        self.start()
        self.device.synchronise()
        return self.timed(self.launches, self.level.counts())

    def timed(self, launches: Iterable[BoundLaunch], header: Mapping[str, int]) -> list[tuple[str, str, float]]:
        """Launches that these counts have programs for, one after the other: (node, kernel, microseconds)."""
        driver, stream, ms = self.device.driver, self.device.stream, C.c_float()
        times = []
        with driver.events() as (begin, end):
            for bound in launches:
                if not bound.programs(header):
                    continue
                driver.cuEventRecord(begin, stream)
                bound.enqueue(self.device, header)
                driver.cuEventRecord(end, stream)
                driver.cuEventSynchronize(end)
                driver.cuEventElapsedTime(C.byref(ms), begin, end)
                times.append((bound.launch.node, bound.launch.kernel, ms.value * 1e3))
        return times

    def bring_inputs(self) -> None:
        """What the step buffers say, on the GPU: for launches one by one."""
        for array_name in self._reads:
            array = getattr(self.level.buffers, array_name)
            self.device.upload(self.level.inputs + self.level.places[array_name], array.reshape(-1).view(np.uint8))

    def _readers_block(self, name: str, tap: Tap) -> Array:
        """Where a result is copied: if a program of the level takes it as an input, where that one's graph copies its input from."""
        reader = self.level.feeds.get(name)
        for block, arrays in [] if reader is None else reader._runs:
            for of, offset, array in arrays:
                if of == name and array.nbytes == tap.num_bytes:
                    return block[offset : offset + array.nbytes]
        self.level.feeds.pop(name, None)
        return self.level.device.pinned(tap.num_bytes)

    def _contiguous(self) -> list[tuple[Array, list[tuple[str, int, Array]]]]:
        """Page-locked copies of the inputs that lie side by side on the GPU, each with the arrays to be copied into it. Wide ones have
        their own: of them only a graph's rows are copied."""
        runs: list[tuple[Array, list[tuple[str, int, Array]]]] = []
        self._targets: list[int] = []
        names = sorted(self._reads, key=self.level.places.__getitem__)
        group: list[str] = []
        for i, name in enumerate(names):
            group.append(name)
            end = self.level.places[name] + aligned(getattr(self.level.buffers, name).nbytes)
            after = names[i + 1] if i + 1 < len(names) else ""
            if after and self.level.places[after] == end and not is_wide(name) and not is_wide(after):
                continue
            start = self.level.places[group[0]]
            block = self.device.pinned(end - start)
            runs.append((block, [(one, self.level.places[one] - start, getattr(self.level.buffers, one)) for one in group]))
            self._targets.append(self.level.inputs + start)
            group = []
        return runs

    def _buckets(self) -> list[tuple[int, ...]]:
        """Counts to make graphs for: rows in powers of two; of rows that want logits all of them, or one for each sequence; of pages that a
        commit fills none, or as many as there can be."""
        limits, counts = self.level.limits, self.counts
        most = {"ROWS": limits.max_num_batched_tokens, "OUT": limits.max_logit_rows, "COMMITS": limits.max_num_batched_tokens}
        if not counts:
            return [()]
        sizes = powers(most[counts[0]])
        if len(counts) == 1:
            return [(size,) for size in sizes]
        if counts[1] == "GROUPS":
            return [(size, groups) for size in sizes for groups in (0, len(self.level.buffers.group_page))]
        few = min(power(limits.max_num_seqs), most["OUT"])
        return sorted({(rows, min(rows, out)) for rows in sizes for out in (few, most["OUT"])})

    def _bucket(self) -> tuple[int, ...]:
        """The smallest bucket that holds the step, and of a list that grows trees its later rounds."""
        header = self.level.buffers.header
        later = int(header[Header.LATER]) if self._grows else 0
        wanted = [max(int(header[Header[name]]), later if name in ("ROWS", "OUT") else 0) for name in self.counts]
        return min((b for b in self._graphs if all(size >= want for size, want in zip(b, wanted, strict=True))), default=max(self._graphs))

    def _capture(self, bucket: tuple[int, ...]) -> C.c_void_p:
        driver, stream, level = self.device.driver, self.device.stream, self.level
        header = dict(zip(self.counts, bucket, strict=True))
        with self.device.capturing() as graph:
            for (block, arrays), target in zip(self._runs, self._targets, strict=True):
                name, _, array = arrays[0]
                size = array[: header["ROWS"]].nbytes if is_wide(name) and "ROWS" in header else len(block)
                driver.cuMemcpyHtoDAsync_v2(C.c_uint64(target), C.c_void_p(block.ctypes.data), C.c_size_t(size), stream)
            for bound in self.launches:
                bound.enqueue(self.device, header)
            for name, staged in self._staged.items():
                source = C.c_uint64(level.inputs + level.places[name])
                driver.cuMemcpyDtoHAsync_v2(C.c_void_p(staged.ctypes.data), source, C.c_size_t(len(staged)), stream)
            for name, staged in self._taps.items():
                size = tap_bytes(self.spec.taps[name], header, level.limits)
                driver.cuMemcpyDtoHAsync_v2(
                    C.c_void_p(staged.ctypes.data), C.c_uint64(level.arena + self.spec.taps[name].arena), C.c_size_t(size), stream)
        self.device.graphs.append(graph)
        return graph


class CudaSample(CudaProgram):
    """`sample`, launched kernel by kernel: it runs in few steps, and of its large inputs (bias, penalties) next to nothing is used."""

    def _buckets(self) -> list[tuple[int, ...]]:
        return []

    def start(self) -> None:
        device, buffers = self.device, self.level.buffers
        device.use()
        header = self.level.counts()
        for name in self._reads:
            for offset, part in self._used(name, header):
                target = C.c_uint64(self.level.inputs + self.level.places[name] + offset)
                # pageable memory: the driver has copied it when the call returns
                device.driver.cuMemcpyHtoDAsync_v2(target, C.c_void_p(part.ctypes.data), C.c_size_t(part.nbytes), device.stream)
        for bound in self.launches:
            bound.enqueue(device, header)
        for name, staged in self._staged.items():
            source = C.c_uint64(self.level.inputs + self.level.places[name])
            size = getattr(buffers, name)[: header["OUT"]].nbytes
            device.driver.cuMemcpyDtoHAsync_v2(C.c_void_p(staged.ctypes.data), source, C.c_size_t(size), device.stream)
        self._started, self._epoch = True, device.epoch

    def _used(self, name: str, header: Mapping[str, int]) -> Iterable[tuple[int, Array]]:
        """(byte offset, array) of what the step's rows and sequences use of an input."""
        array: Array = getattr(self.level.buffers, name)
        first = INPUTS[name][1].partition(" ")[0]
        count = {"words": len(array), "rows": header["ROWS"], "seqs": header["SEQS"], "out": header["OUT"]}[first]
        if name not in SPARSE:
            if array[:count].nbytes:
                yield 0, array[:count]
            return
        for seq in range(count):
            used = int(self.level.buffers.sampling[seq].view(np.int32)[SPARSE[name]])
            if used:
                yield seq * array[0].nbytes, array[seq, :used]


def is_wide(name: str) -> bool:
    """A step input with many numbers a row: hidden states."""
    return INPUTS[name][1].startswith("rows x")


def tap_bytes(tap: Tap, header: Mapping[str, int], limits: Limits) -> int:
    """Bytes of a tap that a step of these counts fills, at most."""
    most = {"ROWS": limits.max_num_batched_tokens, "OUT": limits.max_logit_rows}
    rows = max((header[word] for word, limit in most.items() if word in header and limit == tap.shape[0]), default=tap.shape[0])
    return tap.num_bytes // tap.shape[0] * min(rows, tap.shape[0])


def used_inputs(specs: Iterable[ProgramSpec]) -> set[str]:
    return {arg.input for spec in specs for launch in spec.launches for arg in launch.args if isinstance(arg, InputArg)}


def input_places(sizes: Mapping[str, int], specs: Iterable[ProgramSpec]) -> tuple[dict[str, int], int]:
    """Byte offsets of step inputs on the GPU, and their end. Those that `forward` brings come first, so that one copy brings them all."""
    first = used_inputs(spec for spec in specs if spec.name in ("forward", "follow")) - {*RESULTS, *KEPT}
    places, at = {}, 0
    for name in sorted(sizes, key=lambda name: (name not in first, list(sizes).index(name))):
        places[name] = at
        at += aligned(sizes[name])
    return places, at


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def powers(most: int) -> Sequence[int]:
    """1, 2, 4, .. and `most`."""
    return sorted({min(most, 1 << i) for i in range(most.bit_length() + 1)})
