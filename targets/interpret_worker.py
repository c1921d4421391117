"""The process behind device `interpret`: `python -m mlsdc.targets.interpret_worker FD`, TRITON_INTERPRET=1, requests on stdin.

Before each launch it writes a line `# %node kernel`, so that the other side knows what it was doing when it dies.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.binding import level_info, weight_tensors
from mlsdc.runtime.errors import ArtifactError, MlsdcError
from mlsdc.runtime.manifest import KernelInfo
from mlsdc.runtime.program import (
    ArenaArg,
    Arg,
    FloatArg,
    InputArg,
    IntArg,
    Launch,
    PoolArg,
    ProgramSpec,
    TargetArenaArg,
    TargetInputArg,
    TensorMapArg,
    WeightArg,
)
from mlsdc.runtime.step import Array, Header
from mlsdc.runtime.tensor_map import tiles_of
from mlsdc.targets.interpret import POISON
from mlsdc.targets.triton_build import load_source
from mlsdc.targets.triton_interpreter import descriptor, interpret

ELEMENTS = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16, "i8": torch.int8, "u8": torch.uint8,
            "i32": torch.int32, "u32": torch.int32, "i64": torch.int64}


class Region:
    """One mapping of the shared file: arrays by name, and what lies between them, which nobody may write."""

    def __init__(self, fd: int, described: Mapping[str, Any]) -> None:
        self.whole = np.frombuffer(mmap.mmap(fd, described["length"], offset=described["offset"]), np.uint8)
        self.places: dict[str, tuple[int, int]] = described["places"]
        self._gaps = []
        at = 0
        for name, (start, size) in self.places.items():
            self._gaps.append((name, self.whole[at:start]))
            at = start + size
        self._gaps.append((next(reversed(self.places)), self.whole[at:]))

    def array(self, name: str) -> Array:
        start, size = self.places[name]
        return self.whole[start : start + size]

    def broken(self) -> str | None:
        """The name of an array beside which something was written."""
        return next((name for name, gap in self._gaps if not (gap == POISON).all()), None)


class Level:
    """One level; `first` is the one that was loaded first, the artifact's target, None for itself."""

    def __init__(self, artifact: Artifact, target: str, request: Mapping[str, Any], fd: int, first: Level | None) -> None:
        self.first = first or self
        info = level_info(artifact, request["level"])
        self.regions = {name: Region(fd, request[name]) for name in ("pool", "inputs", "arena") if request[name] is not None}
        self.weights = weight_tensors(artifact, info, target)
        self.programs = artifact.programs(info.name, next(t for t in artifact.manifest.targets if t.name == target))

    @property
    def header(self) -> Array:
        return self.regions["inputs"].array("header").view(np.int32)

    def argument(self, launch: Launch, arg: Arg, type_: str) -> Any:
        """A number, or a tensor that begins at the argument's address."""
        if isinstance(arg, IntArg):
            return arg.int
        if isinstance(arg, FloatArg):
            return arg.float
        if isinstance(arg, TensorMapArg):
            tiles = tiles_of(type_)
            assert tiles is not None, f"{launch.kernel} wants {type_}, the launch gives {arg}"
            return descriptor(self.argument(launch, arg.map.of, f"*{tiles.dtype}"), arg.map.shape, tiles)
        if isinstance(arg, WeightArg):
            if arg.weight not in self.weights:
                raise ArtifactError(f"%{launch.node}: weight '{arg.weight}' is not in the weight file; compile again")
            data = self.weights[arg.weight].reshape(-1).view(np.uint8)
        elif isinstance(arg, InputArg):
            data = self.regions["inputs"].array(arg.input)
        elif isinstance(arg, TargetInputArg):
            data = self.first.regions["inputs"].array(arg.target_input)
        elif isinstance(arg, TargetArenaArg):
            data = self.first.regions["arena"].array("arena")[arg.target_arena :]
        elif isinstance(arg, ArenaArg):
            data = self.regions["arena"].array("arena")[arg.arena :]
        else:
            assert isinstance(arg, PoolArg)
            data = self.regions["pool"].array("pool")[arg.pool :]
        return tensor(data, type_)


def tensor(data: Array, type_: str) -> torch.Tensor:
    """Bytes as a pointer argument of a type."""
    dtype = ELEMENTS[type_.removeprefix("*")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # weights are mapped read-only; no kernel writes them
        return torch.from_numpy(data[: len(data) // dtype.itemsize * dtype.itemsize]).view(dtype)


class KernelList:
    """A level's own kernels over blocks of their own and step inputs of the target."""

    def __init__(self, target: Level, request: Mapping[str, Any], fd: int) -> None:
        self.target = target
        self.blocks = Region(fd, request["blocks"])
        self.calls: list[dict[str, Any]] = request["calls"]

    def argument(self, arg: Any, type_: str) -> Any:
        if isinstance(arg, dict):
            return tensor(self.target.regions["inputs"].array(arg["input"]), type_)
        return tensor(self.blocks.array(arg), type_) if isinstance(arg, str) else arg


class Interpreter:
    def __init__(self, fd: int, out: TextIO) -> None:
        self.fd = fd
        self.out = out
        self.levels: dict[str, Level] = {}
        self.lists: dict[int, KernelList] = {}
        self.functions: dict[str, Any] = {}

    def open(self, request: Mapping[str, Any]) -> None:
        self.artifact = Artifact.open(Path(request["artifact"]))
        self.target = next(target for target in self.artifact.manifest.targets if target.name == request["target"])

    def level(self, request: Mapping[str, Any]) -> None:
        self.levels[request["level"]] = Level(
            self.artifact, self.target.name, request, self.fd, next(iter(self.levels.values()), None))

    def run(self, request: Mapping[str, Any]) -> None:
        level = self.levels[request["level"]]
        spec: ProgramSpec = level.programs[request["program"]]
        for launch in spec.launches[request["first"] : request["first"] + request["count"]]:
            self.launch(level, launch)

    def list(self, request: Mapping[str, Any]) -> None:
        self.lists[request["number"]] = KernelList(self.levels[request["level"]], request, self.fd)

    def run_list(self, request: Mapping[str, Any]) -> None:
        """Raises ArtifactError for a kernel that wrote where it must not."""
        kernels = self.lists[request["number"]]
        for call in kernels.calls:
            if call["if_sent"] and not request["sent"]:
                continue
            info = self.target.kernels[call["kernel"]]
            print(f"# {call['kernel']}", file=self.out, flush=True)
            types = [entry.split(": ")[1] for entry in info.abi[: len(call["args"])]]
            interpret(self.function(info), call["grid"], [kernels.argument(*pair) for pair in zip(call["args"], types, strict=True)])
            for region in (kernels.blocks, *kernels.target.regions.values()):
                if (name := region.broken()) is not None:
                    raise ArtifactError(f"kernel '{call['kernel']}' wrote outside of its arrays, beside '{name}'")

    def launch(self, level: Level, launch: Launch) -> None:
        """Raises ArtifactError for a kernel that wrote where it must not."""
        info = self.target.kernels.get(launch.kernel)
        if info is None:
            raise ArtifactError(f"target {self.target.name}: no kernel '{launch.kernel}'; compile again")
        print(f"# %{launch.node} {launch.kernel}", file=self.out, flush=True)
        names = [entry.split(": ") for entry in info.abi[: len(launch.args)]]
        args = [level.argument(launch, arg, type_) for arg, (_, type_) in zip(launch.args, names, strict=True)]
        interpret(self.function(info), programs(launch, info, level.header), args)
        for region in (*level.regions.values(), *level.first.regions.values()):  # those of the target: a list behind it reads there
            if (name := region.broken()) is not None:
                raise ArtifactError(f"%{launch.node}: kernel '{launch.kernel}' wrote outside of its arrays, beside '{name}'")

    def function(self, info: KernelInfo) -> Any:
        if info.entry not in self.functions:
            self.functions[info.entry] = load_source(self.artifact.path(info.source), info.entry)
        return self.functions[info.entry]


def programs(launch: Launch, info: KernelInfo, header: Array) -> int:
    """How many programs a launch has for what the header says now."""
    if launch.count is None:
        return launch.grid
    if not launch.runs(int(header[Header[launch.count]])):
        return 0
    wanted = launch.grid * -(-int(header[Header[launch.count]]) // launch.grain)
    return min(wanted, info.resources.get("most_programs", wanted))


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a kernel's own prints are no answers
    torch.set_num_threads(1)
    interpreter = Interpreter(int(sys.argv[1]), out)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            getattr(interpreter, request["do"])(request)
            answer = {}
        except MlsdcError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
