"""`<name>.plan.json`, beside an artifact: what `mlsdc tune` measured on one machine, and the plan that follows from it (law L6).

It is keyed by the artifact's hash and the machine; for another one it is not used, and `why` of `find` says so.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.costs import CostTable
from mlsdc.runtime.errors import ArtifactError

FORMAT = 1


@dataclass(frozen=True)
class Rate:
    """Of a level's nodes at one depth, whose path was right: `steps` that had some, the probability `mass` that the level gave them in the
    mean, and the share `hit` of steps in which the target chose one of them."""

    level: str
    depth: int
    sampled: bool
    steps: int
    mass: float
    hit: float


@dataclass(frozen=True)
class PlanSpeed:
    """A way to draft: tokens a second by the model of costs and survival, and as it ran (None: it was not run)."""

    name: str
    predicted: float
    measured: float | None
    length: float  # tokens a step, predicted


@dataclass(frozen=True)
class PlanFile:
    artifact: str
    machine: str
    costs: CostTable
    host_s: float
    rates: tuple[Rate, ...]
    speeds: tuple[PlanSpeed, ...]
    dropped: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # level -> chance that its b-th likeliest sibling is the one
    prompts: int = 0
    tokens: int = 0
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @staticmethod
    def read(path: Path) -> PlanFile:
        """Raises ArtifactError, one line, for what is no such file."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw["format"] != FORMAT:
                raise ArtifactError(f"{path}: plan format {raw['format']}, this runtime reads {FORMAT}: run `mlsdc tune` again")
            costs = raw["costs"]
            table = CostTable(tuple(map(int, costs["contexts"])), tuple(map(int, costs["rows"])),
                              tuple(tuple(map(float, line)) for line in costs["seconds"]),
                              {str(name): _seconds("draft_s", seconds) for name, seconds in costs["draft_s"].items()})
            _check(table)
            return PlanFile(str(raw["artifact"]), str(raw["machine"]), table, _seconds("host_s", raw["host_s"]),
                            tuple(_rate(**rate) for rate in raw["rates"]), tuple(_speed(**speed) for speed in raw["speeds"]),
                            dict(raw["dropped"]), {name: tuple(map(float, chances)) for name, chances in raw["ranks"].items()},
                            int(raw["prompts"]), int(raw["tokens"]))
        except ArtifactError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ArtifactError(f"{path}: not a plan ({type(error).__name__}: {error}); run `mlsdc tune` again or remove it") from None


def _check(table: CostTable) -> None:
    if not table.rows or not table.contexts or list(table.rows) != sorted(set(table.rows)) or table.rows[0] < 1:
        raise ValueError("costs: rows must rise from 1")
    if list(table.contexts) != sorted(set(table.contexts)):
        raise ValueError("costs: contexts must rise")
    if len(table.seconds) != len(table.contexts) or any(len(line) != len(table.rows) for line in table.seconds):
        raise ValueError("costs: seconds do not fit rows and contexts")
    if any(not 0 < second < 1e3 for line in table.seconds for second in line):
        raise ValueError("costs: seconds must be positive")


def _seconds(name: str, value: float) -> float:
    if not 0 <= float(value) < 1e3:
        raise ValueError(f"{name}: {value}, expected seconds")
    return float(value)


def _rate(level: str, depth: int, sampled: bool, steps: int, mass: float, hit: float) -> Rate:
    rate = Rate(str(level), int(depth), bool(sampled), int(steps), float(mass), float(hit))
    if rate.depth < 1 or rate.steps < 0 or not 0 <= rate.mass < inf or not 0 <= rate.hit <= 1:
        raise ValueError(f"rates: {rate}, expected a depth from 1, steps and mass from 0, hit from 0 to 1")
    return rate


def _speed(name: str, predicted: float, measured: float | None, length: float) -> PlanSpeed:
    return PlanSpeed(str(name), float(predicted), None if measured is None else float(measured), float(length))


def plan_path(artifact: Path) -> Path:
    """Where the plan of an artifact folder lies."""
    artifact = artifact.resolve()
    return artifact.with_name(artifact.name.removesuffix(".mlsdc") + ".plan.json")


def machine_key(device: str, threads: int | None) -> str:
    """This machine, as far as times depend on it."""
    model = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{device} on {model}, {threads} threads"


def find(artifact: Artifact, machine: str, path: Path | None = None) -> tuple[PlanFile | None, str]:
    """The plan to use, if there is one for this artifact and machine, and a line that says which. Raises ArtifactError for a broken one,
    and where `path` was asked for and is not there."""
    place = plan_path(artifact.root) if path is None else path
    if not place.is_file():
        if path is not None:
            raise ArtifactError(f"{path}: no such plan; `mlsdc tune` makes it")
        return None, "shipped default: `mlsdc tune` measures this machine"
    plan = PlanFile.read(place)
    if plan.artifact != artifact.sha256:
        return None, f"shipped default: {place.name} is of another artifact ({plan.artifact[:12]}), run `mlsdc tune` again"
    if plan.machine != machine:
        return None, f"shipped default: {place.name} is of another machine ({plan.machine}), run `mlsdc tune` here"
    return plan, f"{place.name}: {plan.prompts} prompts, {plan.tokens} tokens"
