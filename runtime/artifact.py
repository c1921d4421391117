"""An artifact on disk: opened, checked, and nothing in it trusted before that (laws L6, L7).

At load every program, kernel and small file is hashed; weights are checked by size and by the hash of their header, in full only
by `verify` (hashing gigabytes would cost more than starting). Paths are the manifest's, and never lead out of the folder.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePosixPath

from mlsdc.runtime.device.cpu_features import cpu_features, machine_name
from mlsdc.runtime.errors import ArtifactError, DeviceError
from mlsdc.runtime.manifest import LevelInfo, Manifest, TargetInfo
from mlsdc.runtime.program import ProgramSpec
from mlsdc.runtime.safetensors import SafetensorsFile, header_sha256
from mlsdc.runtime.weight_files import LevelWeights

MANIFEST = "manifest.json"


def rank_file(name: str, rank: int) -> str:
    """`weights/target.safetensors` -> `weights/target.rank1.safetensors`: the file of another rank than the first."""
    stem, dot, suffix = name.rpartition(".")
    return name if rank == 0 else f"{stem}.rank{rank}{dot}{suffix}"


class Artifact:
    """A checked artifact folder. Everything read from it goes through `path`."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.root = root
        self.manifest = manifest

    @staticmethod
    def open(path: str | Path) -> Artifact:
        """Read the manifest and check every file. Raises ArtifactError with one line that says what is wrong and what to do."""
        root = Path(path)
        if not root.is_dir():
            raise ArtifactError(f"{path}: no such artifact folder: run `mlsdc compile model.yaml -o {path}`")
        root = root.resolve()
        file = root / MANIFEST
        if not file.is_file():
            raise ArtifactError(f"{path}: no {MANIFEST} in it: this is not an artifact; run `mlsdc compile`")
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{path}/{MANIFEST}: cannot be read ({error}); compile again") from None
        artifact = Artifact(root, Manifest.from_json(text, f"{path}/{MANIFEST}"))
        artifact.check()
        return artifact

    @cached_property
    def sha256(self) -> str:
        """The artifact's own hash: that of its manifest, which holds all the others."""
        return hashlib.sha256((self.root / MANIFEST).read_bytes()).hexdigest()

    def path(self, name: str) -> Path:
        """The file a manifest path names. Raises ArtifactError if it is absolute, leads out of the folder, or is not there."""
        parts = PurePosixPath(name)
        if not name or parts.is_absolute() or ".." in parts.parts or "\\" in name:
            raise ArtifactError(f"{MANIFEST}: '{name}' is not a path inside the artifact")
        file = self.root / name
        if not file.is_file():
            raise ArtifactError(f"{self.root.name}/{name}: missing: the artifact is incomplete, copy or compile it again")
        if not file.resolve().is_relative_to(self.root):
            raise ArtifactError(f"{self.root.name}/{name}: leads out of the artifact: replace the link by the file")
        return file

    def check(self) -> None:
        """All files' hashes, and the weights' sizes and headers. Raises ArtifactError at the first fault."""
        for name, expected in self.manifest.files.items():
            self._check_hash(name, expected)
        for name, (size, _) in self.manifest.weights.items():
            found = self.path(name).stat().st_size
            if found != size:
                raise ArtifactError(
                    f"{self.root.name}/{name}: {found} bytes, expected {size}: it is cut short or another file; copy or compile it again")
            if header_sha256(self.path(name)) != self.manifest.weight_headers.get(name):
                raise ArtifactError(f"{self.root.name}/{name}: its header is not the one that was packed; copy or compile it again")
        listed = {*self.manifest.files, *self.manifest.weights}
        for name in self._mentioned():
            if name not in listed:
                raise ArtifactError(f"{MANIFEST}: '{name}' is used but has no hash; compile again")

    def verify(self) -> list[str]:
        """Everything `check` does, plus every byte of the weights; returns the names that were checked. Raises ArtifactError."""
        self.check()
        for name, (_, expected) in self.manifest.weights.items():
            self._check_hash(name, expected)
        return sorted([*self.manifest.files, *self.manifest.weights])

    def weights(self, level: str) -> SafetensorsFile:
        """The memory-mapped weights that all targets of a level read, but for what `level_weights` says. Raises ArtifactError."""
        name = self._level(level).weights
        if name is None:
            raise ArtifactError(f"{self.root.name}: level '{level}' has no weights")
        own = rank_file(name, self.manifest.rank)
        return SafetensorsFile(self.path(own if own in self.manifest.weights else name))

    def level_weights(self, level: str, target: str) -> LevelWeights:
        """A level's weights as the target of that name lays them out. Raises ArtifactError."""
        common, own = self.weights(level), self._level(level).other_weights.get(target)
        return LevelWeights(common) if own is None else LevelWeights(SafetensorsFile(self.path(own)), common)

    def programs(self, level: str, target: TargetInfo) -> dict[str, ProgramSpec]:
        """A level's programs for a target, by name (`forward`, `commit`). Raises ArtifactError."""
        files = self._level(level).programs.get(target.name)
        if files is None:
            raise ArtifactError(f"{self.root.name}: level '{level}' has no programs for target '{target.name}'; compile again")
        return {
            name: ProgramSpec.from_json(self.path(file).read_text(encoding="utf-8"), f"{self.root.name}/{file}")
            for name, file in files.items()
        }

    def pick_target(self, device: str = "auto", features: frozenset[str] | None = None) -> TargetInfo:
        """The first target in the manifest (the compiler puts the best first) that this machine can run.

        `device` is a kind (`cpu`, `cuda`, the second GPU: `cuda:1`), a target's name, `interpret` (a GPU's target on Triton's interpreter),
        or `auto`: the first GPU, if there is one that the artifact has code for and a driver that loads it, else the CPU (a warning is
        logged where a GPU is there).
        Raises ArtifactError that says what it was built for and what is missing.
        """
        features = cpu_features() if features is None else features
        targets = self.manifest.targets
        if device == "interpret":
            targets = tuple(replace(target, device="interpret") for target in targets if target.device == "cuda")
            if targets:
                return targets[0]
            raise ArtifactError(f"{self.root.name}: has no target for a GPU to interpret: run `mlsdc compile ... --target h100`")
        kind, _, number = device.partition(":")
        wanted = [t for t in targets if kind in ("auto", t.device, t.name)]
        if not wanted:
            built = ", ".join(f"{t.name} ({t.device})" for t in targets) or "nothing"
            raise ArtifactError(
                f"{self.root.name}: built for {built}, device '{device}' was asked for: run `mlsdc compile ... --target` for it")
        able = next((t for t in wanted if t.device == "cpu" and features.issuperset(t.requires)), None)
        gpus = [t for t in wanted if t.device == "cuda"]
        if able is not None:
            return self._gpu_before(able, gpus) if gpus else able
        built = ", ".join(t.name for t in wanted)
        if all(target.device == "hip" for target in wanted):
            raise ArtifactError(f"{self.root.name}: built for {built}, which is compile-only: this runtime does not launch AMD kernels; "
                                "run `mlsdc compile ... --target` for a CPU or an NVIDIA GPU to serve the model")
        if gpus:
            return self._pick_gpu(gpus, number, built)
        lacking = [sorted(set(t.requires) - features) for t in wanted if t.device == "cpu"]
        missing = min(lacking, key=len, default=["a device this runtime can open"])
        raise ArtifactError(
            f"{self.root.name}: built for {built}, this machine has {machine_name(features)} and lacks {', '.join(missing)}: "
            "run `mlsdc targets`, then `mlsdc compile ... --target` for one that fits")

    def _gpu_before(self, cpu: TargetInfo, gpus: Sequence[TargetInfo]) -> TargetInfo:
        """The first GPU's target, if it has one; else the CPU's."""
        from mlsdc.runtime.device.cuda_driver import NoGpu, choose

        try:
            return replace(choose(gpus, 0), device="cuda:0")
        except NoGpu:
            return cpu
        except DeviceError as error:
            logging.getLogger("mlsdc").warning("mlsdc: warning: %s: %s; %s is used", self.root.name, error, cpu.name)
            return cpu

    def _pick_gpu(self, targets: Sequence[TargetInfo], number: str, built: str) -> TargetInfo:
        from mlsdc.runtime.device.cuda_driver import choose

        if number and not number.isdecimal():
            raise ArtifactError(f"device 'cuda:{number}': expected a number such as cuda:1")
        index = int(number or 0)
        try:
            return replace(choose(targets, index), device=f"cuda:{index}")
        except DeviceError as error:
            raise ArtifactError(f"{self.root.name}: built for {built}; {error}") from None

    def _level(self, name: str) -> LevelInfo:
        for level in self.manifest.levels:
            if level.name == name:
                return level
        raise ArtifactError(f"{self.root.name}: no level '{name}'; levels are {', '.join(x.name for x in self.manifest.levels)}")

    def _check_hash(self, name: str, expected: str) -> None:
        with self.path(name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            raise ArtifactError(
                f"{self.root.name}/{name}: sha256 {found[:12]}, expected {expected[:12]}: it was edited; copy or compile it again")

    def _mentioned(self) -> Iterator[str]:
        """Paths of code and weights that the manifest would have the runtime load."""
        for target in self.manifest.targets:
            yield from target.files
            for kernel in target.kernels.values():
                yield kernel.file
                yield from (variant.file for variant in kernel.variants.values())
        for level in self.manifest.levels:
            if level.weights is not None:
                yield level.weights
            yield from level.other_weights.values()
            if level.params.get("counts"):
                yield str(level.params["counts"])
            for programs in level.programs.values():
                yield from programs.values()
