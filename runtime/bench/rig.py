"""An artifact opened for measuring: an engine without drafts, the streaming read, and single steps of any shape."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.bench.stream import StreamRead
from mlsdc.runtime.bench.traffic import Traffic, traffic
from mlsdc.runtime.device import open_device
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import CapacityError
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.request import Result
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.step import Array, Header, Limits
from mlsdc.runtime.tree import ancestor_words, chain


class Rig:
    """One sequence at a time, or `sequences` with pages of their own. Prompts are random tokens, never the same twice, so that no prefix is
    found again."""

    def __init__(self, path: str | Path, *, threads: int | None = None, device: str = "auto", seed: int = 0, sequences: int = 1,
                 tuned: bool = True, kernel_file: Path | None = None) -> None:
        """`tuned`: with the builds of kernels that `mlsdc tune` chose, if it did: in `kernel_file`, by default beside the artifact. Raises
        ArtifactError, DeviceError."""
        self.artifact = Artifact.open(path)
        self.manifest = self.artifact.manifest
        level = self.manifest.target_level
        assert level.kv is not None
        self.geometry = level.kv
        self.limits = self.manifest.limits
        target = self.artifact.pick_target(device)
        self.device = open_device(self.artifact, target, threads=threads)
        try:
            if tuned:
                self.device.take_kernels(kernel_file)
            self.places = place_pages(self.geometry, self.limits, sequences)
            self.memory = self.device.load_level(level.name, self.places.num_pages)
            self.engine = Engine(self.manifest, self.device, self.memory)
            self.forward = self.memory.programs["forward"]
            self.stream = self.open_stream()
        except BaseException:
            self.device.close()
            raise
        self.program = self.artifact.programs(level.name, target)["forward"]
        weights = self.artifact.level_weights(level.name, target.name)
        self.weight_bytes = {name: len(weights.tensor(name)) for name in weights.files}
        self._rng = np.random.default_rng(seed)

    def open_stream(self) -> StreamRead:
        """The streaming read that figures are compared with. Raises DeviceError for a device that has none."""
        return StreamRead(self.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.engine.close()

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        found: list[int] = self._rng.integers(0, self.manifest.model.vocab_size, count).tolist()
        return found

    def traffic(self, rows: int, positions: int) -> Traffic:
        """Bytes that a step of `rows` rows over `positions` positions reads."""
        vocab_size = self.manifest.model.vocab_size
        return traffic(self.program, self.weight_bytes, vocab_size, self.geometry, rows=rows, positions=positions)

    def generate(self, prompt_tokens: int, max_tokens: int) -> Result:
        """One request through the engine, as a user would make it, to its last token. Raises RequestError."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        (result,) = self.engine.generate([self.tokens(prompt_tokens)], params)
        return result

    def fill(self, context: int) -> None:
        """Put `context` random tokens into the sequence's pages."""
        step = self.limits.max_num_batched_tokens
        for start in range(0, context, step):
            self.set_rows(start, min(step, context - start), drafted=False)
            self.forward.run()

    def set_rows(self, context: int, rows: int, *, drafted: bool) -> None:
        """Set the step: `rows` rows after `context` committed tokens; a choice is wanted of the last, if drafted (a chain) of each.

        Raises CapacityError for more than the artifact's limits.
        """
        limits = self.limits
        most = min(limits.max_tree_nodes + 1, limits.max_logit_rows) if drafted else limits.max_num_batched_tokens
        if rows > most:
            raise CapacityError(f"a step of {rows} rows: this artifact has at most {most}; compile with larger limits")
        if context + rows > limits.max_model_len:
            raise CapacityError(f"a context of {context} tokens and {rows} rows: limits.max_model_len is {limits.max_model_len}")
        self.add_rows(0, context, rows, drafted=drafted)

    def add_rows(self, seq: int, context: int, rows: int, *, drafted: bool) -> None:
        """The same of sequence `seq`, behind the rows of those before it in the step; 0 begins one."""
        buffers, places = self.memory.buffers, self.places
        header = buffers.header
        if seq == 0:
            header[:4] = 0
        at, outs, out = int(header[Header.ROWS]), int(header[Header.OUT]), rows if drafted else 1
        here, tokens = slice(at, at + rows), self.tokens(rows)
        buffers.tokens[here] = tokens
        buffers.positions[here] = range(context, context + rows)
        buffers.row_seq[here] = seq
        buffers.row_slot[here] = range(rows) if drafted else -1
        buffers.ancestors[here] = ancestor_words(chain(tokens[1:])) if drafted else 0
        buffers.seq_ctx[seq], buffers.seq_row[seq], buffers.seq_rows[seq] = context, at, rows
        buffers.page_table[seq, : places.pages.shape[1]] = places.pages[seq]
        buffers.scratch_table[seq, : places.scratch.shape[1]] = places.scratch[seq]
        buffers.tail_table[seq, : places.tails.shape[1]] = places.tails[seq]
        buffers.out_rows[outs : outs + out] = range(at + rows - out, at + rows)
        header[Header.ROWS], header[Header.SEQS], header[Header.OUT] = at + rows, seq + 1, outs + out

    def seconds(self, steps: int) -> float:
        """Mean time of the step that is set, over `steps` runs."""
        start = time.perf_counter()
        for _ in range(steps):
            self.forward.run()
        return (time.perf_counter() - start) / steps


class PlainRig(Rig):
    """A rig of any device: without the streaming read, which is the CPU's."""

    def open_stream(self) -> Any:
        return None


@dataclass(frozen=True)
class Places:
    """Where sequences lie in a pool of `num_pages` pages, a row each: pages, then tails (of a grouped format) and scratch slabs, both in
    wide pages where the format has them."""

    pages: Array
    tails: Array
    scratch: Array
    num_pages: int


def place_pages(geometry: KvGeometry, limits: Limits, sequences: int = 1) -> Places:
    per, wide, tail = limits.pages_per_seq(geometry.page_size), geometry.wide or geometry, geometry.tail
    kept, slab = tail.num_pages if tail else 0, limits.scratch_pages(wide.page_size)
    first = -(-sequences * per * geometry.page_bytes // wide.page_bytes)
    behind = first + np.arange(sequences * (kept + slab)).reshape(sequences, -1)
    end = (first + behind.size) * wide.page_bytes
    return Places(np.arange(sequences * per).reshape(sequences, -1), behind[:, :kept], behind[:, kept:], -(-end // geometry.page_bytes))
