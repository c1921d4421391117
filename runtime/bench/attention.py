"""Attention of several artifacts of one model, side by side: kernels alone against the streaming read, and whole steps, on equal threads.

    python -m mlsdc.runtime.bench.attention bf16.mlsdc int8.mlsdc int4.mlsdc --context 4096 --batch 8 [--rows 8]

Each of `batch` sequences has `context` committed tokens in pages of its own, at random places of memory, every one of them written: memory
that was only asked for is one page of zeros, which caches hold. Pages hold keys and values of real tokens, the same few again and again.
A step is one row of each sequence (decode), and `--rows` drafted rows, a chain, of one (verify). Attention's time is that of its launches,
one at a time; its bytes are those of all positions, each once a layer and row of a decode: for a cache with a window, or layers with
windows of their own, that is more than is read.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.bench.rig import Rig
from mlsdc.runtime.bench.spread import Figure, by_round, interleave
from mlsdc.runtime.bench.stream import StreamRead
from mlsdc.runtime.device.cpu import CpuDevice
from mlsdc.runtime.errors import CapacityError, DeviceError

ATTEND = re.compile(r"attend_q(?P<heads>\d+)_")
KINDS = {
    "attend_q": "attention", "prepare_q": "attention", "attend_combine": "folding spans", "append_kv": "append and quantise",
    "quantise_kv": "append and quantise", "settle_kv": "append and quantise", "linear": "linears", "gated": "linears",
}  # fmt: skip
REAL_TOKENS = 512  # that are computed; their pages are copied


class Sequences(Rig):
    """An artifact's target level with `batch` sequences of `context` tokens, ready for steps of `set_decode` and `set_verify`."""

    def __init__(self, path: Path, batch: int, context: int, rows: int, threads: int | None) -> None:
        """Raises ArtifactError, DeviceError, CapacityError for more than the artifact's limits."""
        limits = Artifact.open(path).manifest.limits
        if batch > min(limits.max_num_seqs, limits.max_logit_rows) or rows > min(limits.max_tree_nodes + 1, limits.max_logit_rows):
            raise CapacityError(f"{path}: {batch} sequences and {rows} rows: its limits are {limits}")
        if context + rows > limits.max_model_len:
            raise CapacityError(f"{path}: a context of {context} tokens and {rows} rows: limits.max_model_len is {limits.max_model_len}")
        self.name, self.context, self.batch = path.name, context, batch
        super().__init__(path, threads=threads, sequences=batch)
        shape = self.places.pages.shape
        self.places = replace(self.places, pages=self._rng.permutation(shape[0] * shape[1]).reshape(shape))
        real = min(REAL_TOKENS, context)
        self.fill(real)
        self._copy(max(1, real // self.geometry.page_size))

    def open_stream(self) -> Any:
        """None: one is read for all artifacts. Raises DeviceError for GPUs."""
        if not isinstance(self.device, CpuDevice):
            raise DeviceError(f"device '{self.device.name}': this measures CPUs")
        self.cpu = self.device

    def _copy(self, real: int) -> None:
        """The first `real` pages of the first sequence, again and again, to all others."""
        table, tails = self.places.pages, self.places.tails
        for seq in range(self.batch):
            for page in range(table.shape[1]):
                if seq or page >= real:
                    self.memory.copy_page(int(table[0, page % real]), int(table[seq, page]))
            for place in range(tails.shape[1] if seq else 0):
                self.memory.copy_wide(int(tails[0, place]), int(tails[seq, place]))

    def set_decode(self) -> None:
        """One committed row of every sequence."""
        for seq in range(self.batch):
            self.add_rows(seq, self.context, 1, drafted=False)

    def set_verify(self, rows: int) -> None:
        """A chain of drafted rows of the first sequence, or with one row a plain one."""
        self.add_rows(0, self.context, rows, drafted=rows > 1)

    def step_s(self) -> float:
        start = time.perf_counter()
        self.forward.run()
        return time.perf_counter() - start

    def by_kind(self) -> dict[str, float]:
        """Seconds of a step's launches, one at a time, by what they do."""
        found: dict[str, float] = defaultdict(float)
        for _, kernel, us in self.forward.profile():
            found[next((kind for start, kind in KINDS.items() if kernel.startswith(start)), "the rest")] += us * 1e-6
        return found

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return next(int(match["heads"]) for kernel in self.cpu.target.kernels if (match := ATTEND.match(kernel)))


def measure(paths: list[Path], batch: int, context: int, rows: int, rounds: int, threads: int | None) -> list[Figure]:
    """Figures of all artifacts, from interleaved rounds."""
    with ExitStack() as stack:
        opened = [stack.enter_context(Sequences(path, batch, context, rows, threads)) for path in paths]
        return compared(opened, paths, batch, context, rows, rounds)


def compared(opened: Sequence[Sequences], paths: Sequence[Path], batch: int, context: int, rows: int, rounds: int) -> list[Figure]:
    if len({one.name for one in opened}) < len(opened):
        for one, path in zip(opened, paths, strict=True):
            one.name = str(path)
    stream = StreamRead(opened[0].device)
    kinds: dict[str, list[dict[str, float]]] = defaultdict(list)
    cases: dict[str, Callable[[], float]] = {"stream": stream.run}

    def attention(case: str, one: Sequences, rows: int) -> float:
        one.set_verify(rows) if rows else one.set_decode()
        kinds[case].append(one.by_kind())
        return kinds[case][-1]["attention"]

    def step(one: Sequences) -> float:
        one.set_decode()
        return one.step_s()

    for one in opened:
        cases[f"{one.name} step"] = lambda one=one: step(one)  # type: ignore[misc]
        for count in (0, 1, rows):
            cases[f"{one.name} {count}"] = lambda one=one, count=count: attention(f"{one.name} {count}", one, count)  # type: ignore[misc]
    found = interleave(cases, rounds)
    figures = [Figure("streaming read", "GB/s", tuple(x / 1e9 for x in found["stream"]), f"{opened[0].cpu.threads} threads")]
    first = found[f"{opened[0].name} step"]
    for one in opened:
        kv, cores = one.geometry, one.cpu.threads
        alone, steps = found[f"{one.name} 0"], found[f"{one.name} step"]
        read = tuple(batch * context * kv.bytes_per_token / x for x in alone)
        each = batch * context * kv.num_layers * kv.num_kv_heads
        products = 2 * one.heads * kv.head_dim * kv.num_layers * context
        one_row, more = found[f"{one.name} 1"], found[f"{one.name} {rows}"]
        shares = kinds[f"{one.name} 0"][1:]
        figures += [
            Figure(f"{one.name}: attention", "GB/s", tuple(x / 1e9 for x in read), f"keys and values of {batch} x {context} tokens"),
            Figure(f"{one.name}: of the streaming read", "x", by_round(read, found["stream"])),
            Figure(f"{one.name}: a token and kv head", "ns", tuple(x / each * cores * 1e9 for x in alone), "times threads"),
            Figure(f"{one.name}: step", "tokens/s", tuple(batch / x for x in steps)),
            Figure(f"{one.name}: against the first", "x", by_round(first, steps)),
            Figure(f"{one.name}: verify of {rows}", "GMAC/s", tuple(rows * products / x / cores / 1e9 for x in more), "a thread"),
            Figure(f"{one.name}: {rows} rows / 1 row", "x", by_round(more, one_row), "attention"),
        ]
        for kind in dict.fromkeys((*KINDS.values(), "the rest")):
            part = tuple(100 * x[kind] / sum(x.values()) for x in shares)
            figures.append(Figure(f"{one.name}: {kind}, share", "%", part, "of a decode step"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--context", type=int, default=4096, metavar="N")
    parser.add_argument("--batch", type=int, default=8, metavar="N")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="of a verify")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N")
    args = parser.parse_args()
    figures = measure(args.artifacts, args.batch, args.context, args.rows, args.rounds, args.threads)
    width = max(len(figure.name) for figure in figures)
    for figure in figures:
        print(f"{figure.name:{width}}  {figure.median:9.2f} {figure.low:9.2f} {figure.high:9.2f}  {figure.unit:9} {figure.note}".rstrip())


if __name__ == "__main__":
    main()
