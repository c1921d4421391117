"""`<name>.kernels.json`, beside an artifact: which builds of its kernels `mlsdc tune` found fastest on a GPU, by sizes of a step (law L6).

It is keyed by the artifact's hash, the target, the GPU and its driver; for others it is not used, and `find` says why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.manifest import TargetInfo

FORMAT = 1
DEFAULT = "default"  # the build that is launched without this file
NONE = "no variants in this artifact"


@dataclass(frozen=True)
class Gpu:
    """What times on a GPU depend on: its name, its compute capability (90), and the CUDA version that its driver speaks (12040)."""

    name: str
    sm: int
    cuda: int

    def __str__(self) -> str:
        return f"{self.name}, sm_{self.sm}, a driver for CUDA {self.cuda // 1000}.{self.cuda % 1000 // 10}"


@dataclass(frozen=True)
class Choice:
    """Of launches that count up to `size` (rows, mostly) and more than the choice before this: the fastest build, and the microseconds of
    all that were timed."""

    size: int
    build: str
    us: Mapping[str, float]


@dataclass(frozen=True)
class KernelFile:
    """`kernels`: by kernel its choices, by rising size. `dropped`: by kernel the builds whose results had other bits, and where."""

    artifact: str
    target: str
    gpu: Gpu
    context: int  # tokens that attention was timed behind
    kernels: Mapping[str, tuple[Choice, ...]]
    dropped: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @property
    def changed(self) -> dict[str, tuple[Choice, ...]]:
        """Kernels of which some size takes another build than the default."""
        return {kernel: choices for kernel, choices in self.kernels.items() if any(choice.build != DEFAULT for choice in choices)}

    @staticmethod
    def read(path: Path) -> KernelFile:
        """Raises ArtifactError, one line, for what is no such file."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw["format"] != FORMAT:
                raise ArtifactError(f"{path}: kernels format {raw['format']}, this runtime reads {FORMAT}: run `mlsdc tune` again")
            gpu = Gpu(str(raw["gpu"]["name"]), int(raw["gpu"]["sm"]), int(raw["gpu"]["cuda"]))
            kernels = {str(kernel): tuple(_choice(**choice) for choice in choices) for kernel, choices in raw["kernels"].items()}
            for kernel, choices in kernels.items():
                sizes = [choice.size for choice in choices]
                if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
                    raise ValueError(f"{kernel}: sizes must rise from 1")
            dropped = {str(kernel): {str(name): str(why) for name, why in builds.items()} for kernel, builds in raw["dropped"].items()}
            return KernelFile(str(raw["artifact"]), str(raw["target"]), gpu, int(raw["context"]), kernels, dropped)
        except ArtifactError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ArtifactError(f"{path}: no choice of kernels ({type(error).__name__}: {error}); run `mlsdc tune` again or remove it"
                                ) from None

    def check(self, target: TargetInfo, path: Path) -> None:
        """Raises ArtifactError for kernels and builds that the target does not have."""
        for kernel, choices in self.kernels.items():
            if kernel not in target.kernels:
                raise ArtifactError(f"{path}: target {target.name} has no kernel '{kernel}'; run `mlsdc tune` again or remove it")
            names = (DEFAULT, *target.kernels[kernel].variants)
            for choice in choices:
                if choice.build not in names:
                    raise ArtifactError(f"{path}: kernel '{kernel}' has no build '{choice.build}', it has {', '.join(names)}; run "
                                        "`mlsdc tune` again or remove it")


def told(found: KernelFile) -> Iterator[str]:
    """A choice as a table."""
    yield (f"kernels  of {found.target} on {found.gpu}: {len(found.kernels)} have several builds, {len(found.changed)} take another than "
           f"the default; microseconds of a launch, {found.context:,} tokens behind")
    for kernel, choices in found.kernels.items():
        yield f"  {kernel}"
        for choice in choices:
            times = "  ".join(f"{name} {us:.2f}" for name, us in choice.us.items())
            yield f"    up to {choice.size:5}  {choice.build:12}  of {times}"
        for name, why in found.dropped.get(kernel, {}).items():
            yield f"    left out: {name}, {why}"


def beside(artifact: Artifact) -> Iterator[str]:
    """What lies beside an artifact, in words; of another artifact only that it is. Raises ArtifactError for a broken file."""
    path = kernels_path(artifact.root)
    if not path.is_file():
        return
    found = KernelFile.read(path)
    if found.artifact != artifact.sha256:
        mine = artifact.sha256[:12]
        yield f"kernels  {path.name} is of another artifact ({found.artifact[:12]}, this is {mine}): run `mlsdc tune` again"
        return
    for target in artifact.manifest.targets:
        if target.name == found.target:
            found.check(target, path)
    yield from told(found)


def _choice(size: int, build: str, us: Mapping[str, float]) -> Choice:
    times = {str(name): float(time) for name, time in us.items()}
    if any(not 0 <= time < 1e9 for time in times.values()):
        raise ValueError(f"us: {times}, expected microseconds")
    return Choice(int(size), str(build), times)


def kernels_path(artifact: Path) -> Path:
    """Where the choice of kernels of an artifact folder lies."""
    artifact = artifact.resolve()
    return artifact.with_name(artifact.name.removesuffix(".mlsdc") + ".kernels.json")


def has_variants(target: TargetInfo) -> bool:
    return any(kernel.variants for kernel in target.kernels.values())


def find(artifact: Artifact, target: TargetInfo, gpu: Gpu, path: Path | None = None) -> tuple[KernelFile | None, str]:
    """The choice to use, if there is one for this artifact, target and GPU, and a line that says which. Raises ArtifactError for a broken
    one, and where `path` was asked for and is not there."""
    place = kernels_path(artifact.root) if path is None else path
    if not place.is_file():
        if path is not None:
            raise ArtifactError(f"{path}: no such file; `mlsdc tune` makes it")
        return None, "shipped default: `mlsdc tune` chooses on this GPU" if has_variants(target) else NONE
    found = KernelFile.read(place)
    if found.artifact != artifact.sha256:
        return None, f"shipped default: {place.name} is of another artifact ({found.artifact[:12]}), run `mlsdc tune` again"
    if found.target != target.name:
        return None, f"shipped default: {place.name} is of target {found.target}, this is {target.name}, run `mlsdc tune` again"
    if found.gpu != gpu:
        return None, f"shipped default: {place.name} is of another machine ({found.gpu}; this is {gpu}), run `mlsdc tune` here"
    found.check(target, place)
    return found, f"{place.name}: other builds of {len(found.changed)} kernels"
