"""A level's tensors as one target reads them: those that it lays out in its own way from a file of its own, the rest from the file that the
level's targets share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mlsdc.runtime.safetensors import SafetensorsFile
from mlsdc.runtime.step import Array


class LevelWeights:
    """Tensors of one or two files by name; where both have a name, the first one's counts."""

    def __init__(self, *files: SafetensorsFile) -> None:
        found = {name: file for file in reversed(files) for name in file.tensors}
        order = {file.path: i for i, file in enumerate(files)}
        names = sorted(found, key=lambda name: (order[found[name].path], found[name].tensors[name].begin))
        self.files: Mapping[str, SafetensorsFile] = {name: found[name] for name in names}

    def tensor(self, name: str) -> Array:
        """Its bytes, u8, a read-only view."""
        info = self.files[name].tensors[name]
        return self.files[name].bytes[info.begin : info.end]

    def runs(self) -> Iterator[tuple[Array, dict[str, int]]]:
        """Bytes of tensors that lie one behind the other in a file, and where in them each begins."""
        start = end = 0
        places: dict[str, int] = {}
        last: SafetensorsFile | None = None
        for name, file in self.files.items():
            info = file.tensors[name]
            if last is not None and (file is not last or info.begin != end):
                yield last.bytes[start:end], places
                places = {}
            if not places:
                start = info.begin
            places[name], end, last = info.begin - start, info.end, file
        if last is not None:
            yield last.bytes[start:end], places

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for data, _ in self.runs())
