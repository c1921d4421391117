"""A compiled program as data: a list of kernel launches with their arguments, the same on every device.

`program/<level>.<name>.json` holds one. Nothing in it is an address: a device binds it once, at load, to its weights, its
arena, its page pool and its step buffers, and then runs it any number of times.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Literal, Union

from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.step import INPUTS, Header


@dataclass(frozen=True)
class WeightArg:
    """Address of a tensor of the level's weight file."""

    weight: str


@dataclass(frozen=True)
class ArenaArg:
    """Address of a byte offset in the program's arena (a multiple of 64)."""

    arena: int


@dataclass(frozen=True)
class InputArg:
    """Address of a step input (runtime.step.INPUTS)."""

    input: str


@dataclass(frozen=True)
class PoolArg:
    """Address of the page pool plus a byte offset within a page (the layer's first block)."""

    pool: int


@dataclass(frozen=True)
class TargetArenaArg:
    """Address of a byte offset in the arena of the target's level: what its `forward` has left there, for lists that run behind it."""

    target_arena: int


@dataclass(frozen=True)
class TargetInputArg:
    """Address of a step input of the target's level."""

    target_input: str


@dataclass(frozen=True)
class IntArg:
    int: int


@dataclass(frozen=True)
class FloatArg:
    float: float


@dataclass(frozen=True)
class Mapped:
    """A dense tensor of these sizes, outermost first."""

    of: WeightArg | ArenaArg | InputArg
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorMapArg:
    """A CUtensorMap of a tensor, encoded when the launch is bound. Element type and tiles are the kernel's (runtime.tensor_map)."""

    map: Mapped


Arg = Union[WeightArg, ArenaArg, InputArg, PoolArg, TargetArenaArg, TargetInputArg, IntArg, FloatArg, TensorMapArg]
_ARGS: dict[str, type[Arg]] = {"weight": WeightArg, "arena": ArenaArg, "input": InputArg, "pool": PoolArg, "int": IntArg, "float": FloatArg,
                               "target_arena": TargetArenaArg, "target_input": TargetInputArg}


@dataclass(frozen=True)
class Launch:
    """One kernel over a grid of `grid * header[count]` independent tasks (`count` None: `grid` tasks).

    `grain`: tasks that are best done together, because they are tiny or write to the same cache lines; a thread takes whole grains.
    `node` is the IR value it makes: profiles, traces and diffs are keyed by it. A launch `over` so many or `upto` so many (0: any
    number) is left out for other counts: of a node's launches for few and for many rows one runs.
    """

    node: str
    kernel: str
    grid: int
    count: str | None
    args: tuple[Arg, ...]
    grain: int = 1
    over: int = 0
    upto: int = 0

    def runs(self, count: int) -> bool:
        """Whether it is launched for a count, taken to the next power of two: what graphs are made for."""
        size = 1 << max(count - 1, 0).bit_length()
        return size > self.over and (not self.upto or size <= self.upto)


@dataclass(frozen=True)
class Tap:
    """Where a named result lies in the arena: `logits`, later hidden states. shape[0] is at the limit of what it counts."""

    arena: int
    dtype: Literal["f4", "i4"]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return 4 * prod(self.shape)


@dataclass(frozen=True)
class ProgramSpec:
    name: str
    level: str
    arena_bytes: int
    launches: tuple[Launch, ...]
    taps: dict[str, Tap]

    def kernels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(launch.kernel for launch in self.launches))

    def to_json(self) -> str:
        """One launch a line, so that `diff` of two programs reads."""
        taps = {k: asdict(t) for k, t in self.taps.items()}
        head = {"name": self.name, "level": self.level, "arena_bytes": self.arena_bytes, "taps": taps}
        body = ",\n".join("  " + json.dumps(_plain(launch), separators=(",", ":")) for launch in self.launches)
        return json.dumps(head)[:-1] + ', "launches": [\n' + body + "\n]}\n"

    @staticmethod
    def from_json(text: str, where: Path | str) -> ProgramSpec:
        """Raises ArtifactError, naming `where`, for anything that is not a program."""
        try:
            raw = json.loads(text)
            launches = tuple(
                Launch(x["node"], x["kernel"], x["grid"], x["count"], tuple(_arg(a) for a in x["args"]), x["grain"],
                       x.get("over", 0), x.get("upto", 0))
                for x in raw["launches"])
            taps = {k: Tap(t["arena"], t["dtype"], tuple(t["shape"])) for k, t in raw["taps"].items()}
            return ProgramSpec(raw["name"], raw["level"], raw["arena_bytes"], launches, taps)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{where}: not a program file ({type(error).__name__}: {error}); compile again") from None

    def __post_init__(self) -> None:
        for launch in self.launches:
            if launch.count is not None and launch.count not in Header.__members__:
                raise ValueError(f"{launch.node}: count '{launch.count}' is not a header word")
            for arg in launch.args:
                name = arg.input if isinstance(arg, InputArg) else arg.target_input if isinstance(arg, TargetInputArg) else None
                if name is not None and name not in INPUTS:
                    raise ValueError(f"{launch.node}: '{name}' is not a step input")


def _plain(launch: Launch) -> dict[str, object]:
    """Its fields; bounds of its count only where it has some."""
    return {name: value for name, value in asdict(launch).items() if value or name not in ("over", "upto")}


def _arg(raw: dict[str, object]) -> Arg:
    ((key, value),) = raw.items()
    if key == "map":
        of = _arg(value["of"])  # type: ignore[index]
        if not isinstance(of, WeightArg | ArenaArg | InputArg):
            raise ValueError(f"a map of {of}")
        return TensorMapArg(Mapped(of, tuple(value["shape"])))  # type: ignore[index]
    return _ARGS[key](value)  # type: ignore[arg-type]
