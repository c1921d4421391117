"""An artifact opened for measuring: an engine without drafts, the streaming read, and single steps of any shape."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any

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
from mlsdc.runtime.step import Header, Limits
from mlsdc.runtime.tree import ancestor_words, chain


class Rig:
    """One sequence at a time. Prompts are random tokens, never the same twice, so that no prefix is found again."""

    def __init__(self, path: str | Path, *, threads: int | None = None, device: str = "auto", seed: int = 0) -> None:
        """Raises ArtifactError, DeviceError."""
        self.artifact = Artifact.open(path)
        self.manifest = self.artifact.manifest
        level = self.manifest.target_level
        assert level.kv is not None
        self.geometry = level.kv
        self.limits = self.manifest.limits
        target = self.artifact.pick_target(device)
        self.device = open_device(self.artifact, target, threads=threads)
        try:
            self.device.take_kernels()
            self._pages = self.limits.pages_per_seq(self.geometry.page_size)
            self._scratch, self._tail, num_pages = place_pages(self.geometry, self.limits, self._pages)
            self.memory = self.device.load_level(level.name, num_pages)
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

    def __enter__(self) -> Rig:
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
        limits, buffers = self.limits, self.memory.buffers
        most = min(limits.max_tree_nodes + 1, limits.max_logit_rows) if drafted else limits.max_num_batched_tokens
        if rows > most:
            raise CapacityError(f"a step of {rows} rows: this artifact has at most {most}; compile with larger limits")
        if context + rows > limits.max_model_len:
            raise CapacityError(f"a context of {context} tokens and {rows} rows: limits.max_model_len is {limits.max_model_len}")
        out = rows if drafted else 1
        buffers.tokens[:rows] = self.tokens(rows)
        buffers.positions[:rows] = range(context, context + rows)
        buffers.row_seq[:rows] = 0
        buffers.row_slot[:rows] = range(rows) if drafted else -1
        buffers.ancestors[:rows] = ancestor_words(chain(self.tokens(rows - 1))) if drafted else 0
        buffers.seq_ctx[0], buffers.seq_row[0], buffers.seq_rows[0] = context, 0, rows
        buffers.page_table[0, : self._pages] = range(self._pages)
        buffers.scratch_table[0, : len(self._scratch)] = self._scratch
        buffers.tail_table[0, : len(self._tail)] = self._tail
        buffers.out_rows[:out] = range(rows - out, rows)
        buffers.header[:4] = 0
        buffers.header[Header.ROWS], buffers.header[Header.SEQS], buffers.header[Header.OUT] = rows, 1, out

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


def place_pages(geometry: KvGeometry, limits: Limits, pages: int) -> tuple[range, range, int]:
    """Where a sequence's drafted rows lie behind its `pages`, its tail (of a grouped format: wide pages, as those of the rows are then),
    and how many pages that takes in all."""
    tail, wide = geometry.tail, geometry.wide
    if tail is None or wide is None:
        end = pages + limits.scratch_pages(geometry.page_size)
        return range(pages, end), range(0), end
    first = -(-pages * geometry.page_bytes // wide.page_bytes)
    middle = first + limits.scratch_pages(tail.page_size)
    end = middle + tail.num_pages
    return range(first, middle), range(middle, end), -(-end * wide.page_bytes // geometry.page_bytes)
