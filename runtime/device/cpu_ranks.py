"""A sharded artifact on CPUs: the leader's device, whose programs run on all ranks, and what a rank runs.

A launch of a `sum_ranks` kernel needs every rank's part of a sum: the launch list is cut before it, the ranks exchange their parts there
(ranks.py), and each sums them in order of rank, so that all have the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.cpu import CpuDevice, CpuLevel, CpuProgram
from mlsdc.runtime.device.ranks import LedRanks, Ranks
from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.manifest import TargetInfo
from mlsdc.runtime.program import ArenaArg, InputArg, IntArg, Launch, PoolArg, ProgramSpec
from mlsdc.runtime.step import Array, Header

SUM = "sum_ranks_"  # how the kernels' names begin


def is_sum(launch: Launch) -> bool:
    return launch.kernel.startswith(SUM)


def is_split(specs: Iterable[ProgramSpec]) -> bool:
    """Whether a level with these programs runs on all ranks."""
    return any(is_sum(launch) for spec in specs for launch in spec.launches)


class RankDevice(CpuDevice):
    """One rank's device."""

    def __init__(self, artifact: Artifact, target: TargetInfo, ranks: Ranks, threads: int) -> None:
        self.ranks = ranks
        super().__init__(artifact, target, threads)

    def load_level(self, level: str, num_pages: int) -> CpuLevel:
        return RankLevel(self, level, num_pages)

    def program(self, level: CpuLevel, spec: ProgramSpec) -> CpuProgram:
        return RankProgram(level, spec, self.ranks)

    def close(self) -> None:
        super().close()
        self.ranks.close()


class LeadDevice(RankDevice):
    """Rank 0's, and the engine's. `threads` are of each rank; default: the CPUs this process may use, shared out."""

    def __init__(self, artifact: Artifact, target: TargetInfo, threads: int | None = None) -> None:
        size = artifact.manifest.world_size
        each = max(1, len(os.sched_getaffinity(0)) // size) if threads is None else threads
        super().__init__(artifact, target, LedRanks(artifact.root, target.name, size, each), each)


class RankLevel(CpuLevel):
    """A level of which each rank has a part, or one that runs on rank 0 alone."""

    device: RankDevice

    def __init__(self, device: RankDevice, level: str, num_pages: int) -> None:
        self.level = level
        self.ranks = device.ranks
        self.split = is_split(device.artifact.programs(level, device.target).values())
        self.leads = self.split and self.ranks.rank == 0  # others have to be told
        if self.leads:
            self.ranks.order({"do": "load", "level": level, "pages": num_pages})
        super().__init__(device, level, num_pages)

    def copy_page(self, source: int, target: int) -> None:
        self._tell("copy_page", source, target)
        super().copy_page(source, target)

    def copy_wide(self, source: int, target: int) -> None:
        self._tell("copy_wide", source, target)
        super().copy_wide(source, target)

    def write_page(self, page: int, data: Array) -> None:
        if self.leads:
            raise DeviceError("pages of a sharded artifact differ from rank to rank")
        super().write_page(page, data)

    def _tell(self, verb: str, source: int, target: int) -> None:
        if self.leads:
            self.ranks.order({"do": verb, "level": self.level, "source": source, "target": target})


class RankProgram(CpuProgram):
    """A launch list that is run in pieces, a meeting of all ranks between two of them."""

    level: RankLevel

    def __init__(self, level: CpuLevel, spec: ProgramSpec, ranks: Ranks) -> None:
        super().__init__(level, spec)
        self._ranks = ranks
        self._cuts = [(index, *self._meeting(launch)) for index, launch in enumerate(spec.launches) if is_sum(launch)]
        args = [arg for launch in spec.launches for arg in launch.args]
        self.inputs = sorted({"header", *(arg.input for arg in args if isinstance(arg, InputArg))})  # counts are read by the walker, too
        self._everywhere = self.level.split and (bool(self._cuts) or any(isinstance(arg, PoolArg) for arg in args))

    def _meeting(self, launch: Launch) -> tuple[int, int, int, int]:
        """Of a sum: where the own part lies in the arena, where all parts do, bytes of a row, and of a part with room for all rows."""
        own, parts, _, row, part = launch.args
        assert isinstance(own, ArenaArg) and isinstance(parts, ArenaArg) and isinstance(row, IntArg) and isinstance(part, IntArg)
        return own.arena, parts.arena, row.int, part.int

    def run(self) -> None:
        buffers, arena, size = self.level.buffers, self.level.arena, self._ranks.size
        if self._everywhere and self._ranks.rank == 0:
            order = {"do": "run", "level": self.level.level, "program": self.name}
            self._ranks.order(order, [getattr(buffers, name) for name in self.inputs])
        begin = 0
        for index, own, parts, row, part in self._cuts:
            self._run_from(begin, index)
            count = self.spec.launches[index].count
            assert count is not None
            used = int(buffers.header[Header[count]]) * row
            self._ranks.exchange(arena[own : own + used], [arena[at : at + used] for at in range(parts, parts + size * part, part)])
            begin = index
        self._run_from(begin, len(self.spec.launches))

    def _run_from(self, begin: int, end: int) -> None:
        device = self.level.device
        device.launch_list(device.pool.ctypes.data, self.launches[begin].ctypes.data, end - begin, self.level.buffers.header.ctypes.data)
        self.check(begin)

    def profile(self) -> list[tuple[str, str, float]]:
        if self._everywhere:
            raise DeviceError(f"program '{self.name}' runs on {self._ranks.size} ranks, which meet between its launches: they cannot be "
                              "timed one by one")
        return super().profile()


def serve_rank(root: Path, target_name: str, ranks: Ranks, threads: int) -> None:
    """A rank's life: load, say so, obey until the leader's connection closes.

    Raises Gone then, MlsdcError for what cannot be loaded or run.
    """
    opened = Artifact.open(root)
    artifact = Artifact(opened.root, replace(opened.manifest, rank=ranks.rank))
    target = next(info for info in artifact.manifest.targets if info.name == target_name)
    device = RankDevice(artifact, target, ranks, threads)
    levels: dict[str, Any] = {}
    (leader,) = ranks.links
    try:
        leader.send_message({"loaded": ranks.rank})
        while True:
            order = leader.receive_message()
            if order["do"] == "load":
                levels[order["level"]] = device.load_level(order["level"], order["pages"])
                continue
            level = levels[order["level"]]
            if order["do"] == "run":
                program = level.programs[order["program"]]
                for name in program.inputs:
                    leader.receive(getattr(level.buffers, name))
                program.run()
            else:
                getattr(level, order["do"])(order["source"], order["target"])
    finally:
        device.close()
