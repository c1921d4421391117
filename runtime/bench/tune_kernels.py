"""`mlsdc tune` on a GPU: which build of each kernel is fastest, by sizes of a step.

A size's builds are timed in turn, each as a graph of all the launches of the kernel that a level's programs have (other layers, other
weights), behind a write that empties the GPU's cache; the median counts. A build whose results are not the default's, bit for bit, is left
out.
"""

from __future__ import annotations

import ctypes as C
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from mlsdc.runtime.bench.rig import PlainRig, Rig, place_pages
from mlsdc.runtime.device.cuda import CudaDevice, CudaLevel
from mlsdc.runtime.device.cuda_program import BoundLaunch, Build, CudaProgram, powers
from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.kernel_file import DEFAULT, Choice, KernelFile, has_variants
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.program import InputArg
from mlsdc.runtime.step import Array, Header, Limits

CONTEXT = 2048  # tokens in front of a step's rows, at most
ROUNDS = 11
BETTER = 0.98  # of the default's time: what a build must need less than to be taken
FLUSH_BYTES = 128 << 20  # more than a GPU's cache holds


def tune_kernels(path: Path, *, device: str = "cuda", context: int = CONTEXT, rounds: int = ROUNDS, flush_bytes: int = FLUSH_BYTES,
                 say: Callable[[str], None] = lambda text: None) -> KernelFile:
    """Measure every kernel that has variants. Raises ArtifactError, DeviceError."""
    with PlainRig(path, device=device, tuned=False) as rig:  # a choice that cannot be read is no reason not to make another
        card = rig.device
        if not isinstance(card, CudaDevice) or not has_variants(card.target):
            raise DeviceError(f"{path}: target {rig.device.name} has no variants of kernels to choose among"
                              + (": compile with kernels.variants" if isinstance(card, CudaDevice) else ""))
        behind = max(1, min(context, rig.limits.max_model_len - share(rig.limits, rig.limits.max_num_batched_tokens)))
        rig.fill(behind)
        kernels: dict[str, tuple[Choice, ...]] = {}
        dropped: dict[str, dict[str, str]] = {}
        with Flush(card, flush_bytes) as flush:
            for info in reversed(rig.manifest.levels):  # the target first: what it shares is timed in it
                if not info.programs:
                    continue
                level = rig.memory if info is rig.manifest.target_level else card.load_level(info.name, pages_of(rig, info.kv))
                assert isinstance(level, CudaLevel)
                for key, launches in launches_of(level).items():
                    if key in kernels or not card.target.kernels[key].variants:
                        continue
                    say(f"{info.name}: {key}")
                    bench = KernelBench(level, info.kv or rig.geometry, key, launches, flush)
                    kernels[key], wrong = bench.choices(behind, rounds)
                    if wrong:
                        dropped[key] = wrong
        return KernelFile(rig.artifact.sha256, card.target.name, card.key, behind, kernels, dropped)


def share(limits: Limits, rows: int) -> int:
    """Rows of each sequence of a step of `rows` rows, at most."""
    return -(-rows // min(rows, limits.max_num_seqs))


def pages_of(rig: Rig, geometry: KvGeometry | None) -> int:
    """Pages of a level's own that the rig's pool has room for."""
    return rig.memory.num_pages * rig.geometry.page_bytes // geometry.page_bytes if geometry else 0


def launches_of(level: CudaLevel) -> dict[str, list[BoundLaunch]]:
    """A level's launches by kernel, of all its programs."""
    found: dict[str, list[BoundLaunch]] = defaultdict(list)
    for program in level.programs.values():
        assert isinstance(program, CudaProgram)
        for bound in program.launches:
            found[bound.launch.kernel].append(bound)
    return found


class Flush:
    """Memory whose writing leaves nothing else in the GPU's cache."""

    def __init__(self, card: CudaDevice, num_bytes: int) -> None:
        self.card, self.num_bytes = card, min(num_bytes, card.driver.free_bytes()[0] // 2)

    def __enter__(self) -> Flush:
        self.address = self.card.driver.allocate(self.num_bytes)
        return self

    def __exit__(self, *error: object) -> None:
        self.card.use()
        self.card.driver.cuMemFree_v2(C.c_uint64(self.address))

    def __call__(self) -> None:
        self.card.driver.cuMemsetD8Async(C.c_uint64(self.address), C.c_ubyte(0), C.c_size_t(self.num_bytes), self.card.stream)


class KernelBench:
    """One kernel of a level, with its builds."""

    def __init__(self, level: CudaLevel, geometry: KvGeometry, key: str, launches: Sequence[BoundLaunch], flush: Flush) -> None:
        self.level, self.geometry, self.launches, self.flush = level, geometry, launches, flush
        self.card = level.device
        names = self.card.target.kernels[key].variants
        self.builds = {DEFAULT: [bound.default for bound in launches]}
        self.builds |= {name: [Build.of(self.card.variant(key, name), bound.launch) for bound in launches] for name in names}
        self.count = launches[0].launch.count
        programs = level.programs.values()
        self.arena_bytes = max(program.spec.arena_bytes for program in programs if isinstance(program, CudaProgram))
        values = np.random.default_rng(0).standard_normal(self.arena_bytes // 4 + 1, np.float32)
        self.given: Array = values.view(np.uint8)[: self.arena_bytes]  # numbers, or codes and scales: any bytes will do

    def choices(self, context: int, rounds: int) -> tuple[tuple[Choice, ...], dict[str, str]]:
        """The fastest build for each size, and those that differ from the default, with where they do."""
        found: list[Choice] = []
        dropped: dict[str, str] = {}
        for size in self.sizes():
            if context + share(self.level.limits, size) > self.level.limits.max_model_len:
                continue  # no step has so many
            header = self.set_step(size, context)
            if not any(bound.programs(header, bound.default) for bound in self.launches):
                continue
            where = f"other bits than the default at {size} {(self.count or 'programs').lower()}"
            dropped |= dict.fromkeys([name for name in self.different(header) if name not in dropped], where)
            us = self.times(header, [name for name in self.builds if name not in dropped], rounds)
            best = min(us, key=us.__getitem__)
            found.append(Choice(size, best if us[best] < BETTER * us[DEFAULT] else DEFAULT, us))
        kept = (Choice(choice.size, DEFAULT if choice.build in dropped else choice.build, choice.us) for choice in found)
        return tuple(kept), dropped

    def sizes(self) -> Sequence[int]:
        """The counts that graphs are made for."""
        limits = self.level.limits
        return powers(limits.max_logit_rows if self.count == "OUT" else limits.max_num_batched_tokens)

    def set_step(self, size: int, context: int) -> Mapping[str, int]:
        """A step of `size` rows: as many sequences as there can be, all over the same pages, each with its share of rows behind `context`
        tokens. Returns the counts."""
        limits, buffers = self.level.limits, self.level.buffers
        rows = min(size, limits.max_num_batched_tokens)
        seqs = min(rows, limits.max_num_seqs)
        places = place_pages(self.geometry, limits)
        shares = np.array_split(np.arange(rows), seqs)
        buffers.tokens[:rows] = 1
        buffers.row_slot[:rows], buffers.ancestors[:rows] = -1, 0
        for seq, share in enumerate(shares):
            buffers.row_seq[share] = seq
            buffers.positions[share] = context + np.arange(len(share))
            buffers.seq_ctx[seq], buffers.seq_row[seq], buffers.seq_rows[seq] = context, share[0], len(share)
            for table, of_one in ((buffers.page_table, places.pages), (buffers.scratch_table, places.scratch),
                                  (buffers.tail_table, places.tails)):
                table[seq, : of_one.shape[1]] = of_one[0]
        out = min(size, limits.max_logit_rows, rows)
        buffers.out_rows[:out] = range(out)
        buffers.header[:4] = 0
        buffers.header[Header.ROWS], buffers.header[Header.SEQS], buffers.header[Header.OUT] = rows, seqs, out
        for name in {arg.input for bound in self.launches for arg in bound.launch.args if isinstance(arg, InputArg)}:
            array: Array = getattr(buffers, name)
            numbers = self.given[: array.nbytes] if array.dtype == np.float32 else array.reshape(-1).view(np.uint8)
            self.put(self.level.inputs + self.level.places[name], numbers)
        return self.level.counts()

    def put(self, address: int, data: Array) -> None:
        """Bytes from pageable memory, in the order of the stream."""
        self.card.driver.cuMemcpyHtoDAsync_v2(
            C.c_uint64(address), C.c_void_p(data.ctypes.data), C.c_size_t(data.nbytes), self.card.stream)

    def different(self, header: Mapping[str, int]) -> Iterator[str]:
        """Builds whose results are not the default's, of the first launch, from the same bytes."""
        bound = next(bound for bound in self.launches if bound.programs(header, bound.default))
        index = self.launches.index(bound)

        def result(build: Build) -> Array:
            self.put(self.level.arena, self.given)
            bound.enqueue(self.card, header, build)
            return self.card.download(self.level.arena, self.arena_bytes)

        wanted = result(self.builds[DEFAULT][index])
        for name, builds in self.builds.items():
            if name != DEFAULT and not np.array_equal(result(builds[index]), wanted):
                yield name

    def times(self, header: Mapping[str, int], names: Sequence[str], rounds: int) -> dict[str, float]:
        """Microseconds of a launch, the median of interleaved rounds."""
        driver, stream, ms = self.card.driver, self.card.stream, C.c_float()
        count = sum(1 for bound in self.launches if bound.programs(header, bound.default))
        us: dict[str, list[float]] = {name: [] for name in names}
        with ExitStack() as stack:
            begin, end = stack.enter_context(driver.events())
            graphs = {}
            for name in names:
                graphs[name] = self.graph(header, self.builds[name])
                stack.callback(driver.cuGraphExecDestroy, graphs[name])
            for turn in range(rounds + 1):  # the first warms up
                for name in names[:: 1 if turn % 2 else -1]:
                    self.flush()
                    driver.cuEventRecord(begin, stream)
                    driver.cuGraphLaunch(graphs[name], stream)
                    driver.cuEventRecord(end, stream)
                    driver.cuEventSynchronize(end)
                    driver.cuEventElapsedTime(C.byref(ms), begin, end)
                    if turn:
                        us[name].append(1e3 * ms.value / count)
        return {name: median(found) for name, found in us.items()}

    def graph(self, header: Mapping[str, int], builds: Sequence[Build]) -> C.c_void_p:
        with self.card.capturing() as graph:
            for bound, build in zip(self.launches, builds, strict=True):
                bound.enqueue(self.card, header, build)
        return graph
