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
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.bench.spread import Figure, by_round, interleave
from mlsdc.runtime.bench.stream import StreamRead
from mlsdc.runtime.device import open_device
from mlsdc.runtime.device.cpu import CpuDevice
from mlsdc.runtime.errors import CapacityError, DeviceError
from mlsdc.runtime.step import Header
from mlsdc.runtime.tree import ancestor_words, chain

ATTEND = re.compile(r"attend_q(?P<heads>\d+)_")
KINDS = {
    "attend_q": "attention", "prepare_q": "attention", "attend_combine": "folding spans", "append_kv": "append and quantise",
    "quantise_kv": "append and quantise", "settle_kv": "append and quantise", "linear": "linears", "gated": "linears",
}  # fmt: skip
REAL_TOKENS = 512  # that are computed; their pages are copied


class Sequences:
    """An artifact's target level with `batch` sequences of `context` tokens, ready for steps of `set_decode` and `set_verify`."""

    def __init__(self, path: Path, batch: int, context: int, rows: int, threads: int | None) -> None:
        """Raises ArtifactError, DeviceError, CapacityError for more than the artifact's limits."""
        artifact = Artifact.open(path)
        level, limits = artifact.manifest.target_level, artifact.manifest.limits
        assert level.kv is not None
        if batch > min(limits.max_num_seqs, limits.max_logit_rows) or rows > min(limits.max_tree_nodes + 1, limits.max_logit_rows):
            raise CapacityError(f"{path}: {batch} sequences and {rows} rows: its limits are {limits}")
        if context + rows > limits.max_model_len:
            raise CapacityError(f"{path}: a context of {context} tokens and {rows} rows: limits.max_model_len is {limits.max_model_len}")
        self.name, self.context, self.batch, self.geometry = path.name, context, batch, level.kv
        self._vocab_size = artifact.manifest.model.vocab_size
        self._rng = np.random.default_rng(0)
        device = open_device(artifact, artifact.pick_target("auto"), threads=threads)
        if not isinstance(device, CpuDevice):
            raise DeviceError(f"device '{device.name}': this measures CPUs")
        self.device = device
        kv = level.kv
        per = limits.pages_per_seq(kv.page_size)
        slab = limits.scratch_pages(kv.page_size if kv.wide is None else kv.wide.page_size)
        tail = 0 if kv.tail is None else kv.tail.num_pages
        wide = kv if kv.wide is None else kv.wide
        first = -(-batch * per * kv.page_bytes // wide.page_bytes)  # tails and scratch slabs lie behind all pages
        size = (first + batch * (tail + slab)) * wide.page_bytes
        self.memory = device.load_level(level.name, -(-size // kv.page_bytes))
        self.forward = self.memory.programs["forward"]
        places = first + np.arange(batch * (tail + slab)).reshape(batch, -1)
        buffers = self.memory.buffers
        if tail:
            buffers.tail_table[:batch, :tail] = places[:, :tail]
        buffers.scratch_table[:batch, :slab] = places[:, tail:]
        buffers.page_table[:batch] = self._rng.permutation(batch * per).reshape(batch, per)
        self._fill(min(REAL_TOKENS, context), limits.max_num_batched_tokens, tail)

    def _fill(self, tokens: int, most: int, tail: int) -> None:
        memory, size = self.memory, self.geometry.page_size
        for start in range(0, tokens, most):
            self._set(0, start, min(most, tokens - start), drafted=False)
            self.forward.run()
        table, real = memory.buffers.page_table[: self.batch], max(1, tokens // size)
        for seq in range(self.batch):
            for page in range(table.shape[1]):
                if seq or page >= real:
                    memory.copy_page(int(table[0, page % real]), int(table[seq, page]))
            for place in range(tail if seq else 0):
                memory.copy_wide(int(memory.buffers.tail_table[0, place]), int(memory.buffers.tail_table[seq, place]))

    def _set(self, seq: int, context: int, rows: int, *, drafted: bool) -> None:
        """Put rows of a sequence at the end of the step; `seq` 0 begins one."""
        buffers = self.memory.buffers
        header = buffers.header
        if seq == 0:
            header[:] = 0
        at, out = int(header[Header.ROWS]), rows if drafted else 1
        here = slice(at, at + rows)
        tokens = self._rng.integers(0, self._vocab_size, rows)
        buffers.tokens[here] = tokens
        buffers.positions[here] = range(context, context + rows)
        buffers.row_seq[here] = seq
        buffers.row_slot[here] = range(rows) if drafted else -1
        buffers.ancestors[here] = ancestor_words(chain(tokens[1:].tolist())) if drafted else 0
        buffers.seq_ctx[seq], buffers.seq_row[seq], buffers.seq_rows[seq] = context, at, rows
        outs = int(header[Header.OUT])
        buffers.out_rows[outs : outs + out] = range(at + rows - out, at + rows)
        header[Header.ROWS], header[Header.SEQS], header[Header.OUT] = at + rows, seq + 1, outs + out

    def set_decode(self) -> None:
        """One committed row of every sequence."""
        for seq in range(self.batch):
            self._set(seq, self.context, 1, drafted=False)

    def set_verify(self, rows: int) -> None:
        """A chain of drafted rows of the first sequence, or with one row a plain one."""
        self._set(0, self.context, rows, drafted=rows > 1)

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
        return next(int(match["heads"]) for kernel in self.device.target.kernels if (match := ATTEND.match(kernel)))


def measure(paths: list[Path], batch: int, context: int, rows: int, rounds: int, threads: int | None) -> list[Figure]:
    """Figures of all artifacts, from interleaved rounds."""
    opened = [Sequences(path, batch, context, rows, threads) for path in paths]
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
    figures = [Figure("streaming read", "GB/s", tuple(x / 1e9 for x in found["stream"]), f"{opened[0].device.threads} threads")]
    first = found[f"{opened[0].name} step"]
    for one in opened:
        kv, cores = one.geometry, one.device.threads
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
    for one in opened:
        one.device.close()
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
