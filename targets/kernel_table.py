"""What every kernel of two models takes on every architecture, as compiled by `mlsdc targets --compile`: the record in kernel_table.tsv.

A line is one kernel; a kernel that spills or does not fit fails the compile and never gets here (nvidia_build.misfit).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from mlsdc.targets.hardware import GPUS

TABLE = Path(__file__).with_name("kernel_table.tsv")
GPU_OF = {gpu.sm: gpu for gpu in GPUS.values()}  # one for each architecture


@dataclass(frozen=True)
class Line:
    """A kernel of a `model` for sm_`sm`; `source` is the beginning of the sha256 of its generated text."""

    sm: int
    model: str
    template: str
    kernel: str
    source: str
    registers: int
    shared_bytes: int
    threads: int
    num_stages: int
    tensor_ops: int
    stack_bytes: int

    @property
    def warps(self) -> int:
        return self.threads // 32


def source_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_table(path: Path = TABLE) -> list[Line]:
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    found = []
    for line in lines:
        sm, model, template, kernel, source, *numbers = line.split("\t")
        found.append(Line(int(sm), model, template, kernel, source, *map(int, numbers)))
    return found


def write_table(lines: Iterable[Line], path: Path = TABLE) -> None:
    names = "\t".join(field.name for field in fields(Line))
    rows = ("\t".join(map(str, astuple(line))) for line in sorted(lines, key=lambda line: (line.sm, line.model, line.kernel)))
    path.write_text("\n".join([names, *rows]) + "\n", encoding="utf-8")


def summary(lines: Iterable[Line]) -> Iterator[str]:
    """A line of text for each architecture, model and template: the worst of its kernels."""
    groups: dict[tuple[int, str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.sm, line.model, line.template), []).append(line)
    yield f"{'arch':8}{'model':15}{'template':18}{'kernels':>8}{'registers':>11}{'shared':>9}{'of':>9}{'warps':>7}{'stages':>8}  spills"
    for (sm, model, template), kernels in sorted(groups.items()):
        warps, stages = ({getattr(line, name) for line in kernels} for name in ("warps", "num_stages"))
        yield (f"sm_{sm:<5}{model:15}{template:18}{len(kernels):8}{max(line.registers for line in kernels):11}"
               f"{max(line.shared_bytes for line in kernels):9,}{GPU_OF[sm].shared_bytes:9,}{span(warps):>7}{span(stages):>8}  "
               f"{sum(line.stack_bytes > 0 for line in kernels) or 'none'}")


def span(numbers: set[int]) -> str:
    return str(min(numbers)) if len(numbers) == 1 else f"{min(numbers)}-{max(numbers)}"
