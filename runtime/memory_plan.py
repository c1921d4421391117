"""Bytes before anything is allocated: weights, activations, step buffers, and what sequences take of the page pool, level by level.

The plan is made of what an artifact says and nothing else: no free memory is probed, so the same artifact plans the same everywhere. It is
checked when an artifact is compiled and when it is loaded; what does not fit is refused with the whole table.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.binding import NO_PAGES, input_widths
from mlsdc.runtime.errors import ArtifactError, CapacityError
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.kv_tail import Tail
from mlsdc.runtime.kv_window import KvWindow, window_of
from mlsdc.runtime.levels.ngram_ahead import device_bytes
from mlsdc.runtime.manifest import LevelInfo, TargetInfo
from mlsdc.runtime.slabs import slab_bytes_for
from mlsdc.runtime.step import INPUTS, Limits, input_shape, tail_widths

NO_WIDTHS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class LevelNeed:
    """What one level takes beside its pages. `arena` holds activations and logits; `logits` of these are the logits of the worst step."""

    name: str
    kv: KvGeometry | None = None
    weights: int = 0
    arena: int = 0
    logits: int = 0
    widths: Mapping[str, int] = field(default_factory=dict)  # of step inputs that not every level has
    window: KvWindow | None = None
    tables: int = 0  # of counts on the device


@dataclass(frozen=True)
class LevelPlan:
    """A level's bytes at the limits. Page counts are of one sequence; the worst tree is in its scratch pages."""

    name: str
    kv: KvGeometry | None
    weights: int
    arena: int
    logits: int
    buffers: int
    scratch_pages: int
    max_model_len: int
    window: KvWindow | None = None
    most_rows: int = 0  # of a sequence in a step
    tables: int = 0

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on who is served."""
        return self.weights + self.arena + self.buffers + self.tables

    def sequence_bytes(self, context: int, *, drafts: bool = True) -> int:
        """Of the pool, for one sequence of `context` cached tokens; with `drafts` its scratch slab, too."""
        if self.kv is None:
            return 0
        return sum(page_bytes * count for page_bytes, count in self.pages(context, drafts=drafts))

    def pages(self, context: int, *, drafts: bool = True) -> list[tuple[int, int]]:
        """(bytes of a page, pages) of each kind that such a sequence takes: the level's own, and wide ones in a grouped format."""
        kv = self.kv
        if kv is None:
            return []
        scratch = self.scratch_pages if drafts else 0
        count = -(-context // kv.page_size) if self.window is None else self.window.most_pages(context, self.most_rows, kv.page_size)
        if kv.tail is None or kv.wide is None:
            return [(kv.page_bytes, count + scratch)]
        return [(kv.page_bytes, count), (kv.wide.page_bytes, tail_pages(kv.tail, context) + scratch)]


@dataclass(frozen=True)
class MemoryPlan:
    """A whole artifact. `pool_bytes` is what sequences share; `budget` the bytes all of it may take, None where only the pool was given."""

    levels: tuple[LevelPlan, ...]
    limits: Limits
    pool_bytes: int
    budget: int | None = None

    @property
    def fixed(self) -> int:
        return sum(level.fixed for level in self.levels)

    @property
    def total(self) -> int:
        return self.fixed + self.pool_bytes

    @property
    def num_pages(self) -> int:
        """Pages of the target's that cover all slabs: what a device must have room for."""
        kv = self.levels[-1].kv
        return -(-self.num_slabs * self.slab_bytes // kv.page_bytes) if kv else 0

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Of every level that has pages, wide ones included."""
        kinds = (kind for level in self.levels if level.kv is not None for kind in (level.kv, level.kv.wide))
        return tuple(kind.page_bytes for kind in kinds if kind is not None)

    @property
    def slab_bytes(self) -> int:
        return slab_bytes_for(self.page_bytes, self.pool_bytes)

    @property
    def num_slabs(self) -> int:
        return self.pool_bytes // self.slab_bytes if self.slab_bytes else 0

    def sequence_bytes(self, context: int, *, drafts: bool = True) -> int:
        """Of the pool, for one sequence of `context` cached tokens, over all levels."""
        return sum(level.sequence_bytes(context, drafts=drafts) for level in self.levels)

    def users(self, context: int, *, drafts: bool = True) -> int:
        """Sequences of `context` cached tokens that fit into the pool at once, each kind of page in slabs of its own."""
        kinds = self._kinds(context, drafts)
        if not kinds or not self.slab_bytes:
            return 0
        users = self.pool_bytes // max(1, sum(page_bytes * count for page_bytes, count in kinds))
        while users and self._slabs([(page_bytes, users * count) for page_bytes, count in kinds]) > self.num_slabs:
            users -= 1
        return users

    def _kinds(self, context: int, drafts: bool) -> list[tuple[int, int]]:
        return [kind for level in self.levels for kind in level.pages(context, drafts=drafts)]

    def _slabs(self, kinds: Sequence[tuple[int, int]]) -> int:
        """Slabs that hold so many pages of each kind; a page that would lie in two slabs is not counted."""
        cuts = [self.slab_bytes // page_bytes - (self.slab_bytes % page_bytes > 0) for page_bytes, _ in kinds]
        return sum(-(-count // cut) if cut else self.num_slabs + 1 for cut, (_, count) in zip(cuts, kinds, strict=True))

    def check(self, context: int) -> None:
        """Raises CapacityError, with the table, unless the pool holds one sequence of `context` tokens and all of it is in the budget."""
        if self.budget is not None and self.total > self.budget:
            raise CapacityError(self._refusal(f"memory: {self.total} bytes are needed, the budget is {self.budget}"))
        if self.users(context) < 1:
            raise CapacityError(self._refusal(
                f"kv pool: {self.pool_bytes} bytes; one sequence of {context} tokens needs {self._least(context)}"))

    def _least(self, context: int) -> int:
        kinds = self._kinds(context, True)
        return self.sequence_bytes(context) if len(kinds) < 2 or not self.slab_bytes else self._slabs(kinds) * self.slab_bytes

    def _refusal(self, why: str) -> str:
        return "\n".join([why, *self.table()])

    def table(self) -> Iterator[str]:
        """What goes where, a line an item."""
        yield f"{'':24}{'bytes':>16}"
        for level in self.levels:
            for what in ("weights", "arena", "buffers", "tables"):
                if value := getattr(level, what):
                    shown = what == "arena" and level.logits
                    of = f"  of these {level.logits:,} logits of {self.limits.max_logit_rows} rows" if shown else ""
                    yield f"{level.name + ' ' + what:24}{value:16,}{of}"
        yield f"{'kv pool':24}{self.pool_bytes:16,}  {self.num_slabs} slab{'s' if self.num_slabs != 1 else ''} of {self.slab_bytes:,}"
        yield f"{'total':24}{self.total:16,}" + (f"  budget {self.budget:,}" if self.budget is not None else "")


def plan_memory(needs: Sequence[LevelNeed], limits: Limits, *, pool_bytes: int | None = None, budget: int | None = None) -> MemoryPlan:
    """The plan; without `pool_bytes` the pool is what the budget leaves, or what `default_pool_bytes` says without a budget."""
    levels = tuple(
        LevelPlan(need.name, need.kv, need.weights, need.arena, need.logits,
                  buffer_bytes(limits, need.kv.page_size if need.kv else NO_PAGES, need.widths, need.kv.tail if need.kv else None)
                  if need.arena else 0,
                  limits.scratch_pages((need.kv.wide or need.kv).page_size) if need.kv else 0, limits.max_model_len, need.window,
                  limits.max_num_batched_tokens, need.tables)
        for need in needs)
    if pool_bytes is None:
        fixed = sum(level.fixed for level in levels)
        each = sum(level.sequence_bytes(limits.max_model_len) for level in levels)
        pool_bytes = max(0, budget - fixed) if budget is not None else default_pool_bytes(each, limits)
    return MemoryPlan(levels, limits, pool_bytes, budget)


def load_plan(artifact: Artifact, target: TargetInfo, *, num_pages: int | None = None, kv_pool_bytes: int | None = None,
              budget: int | None = None) -> MemoryPlan:
    """What `Engine.load` allocates. The first of these that is given says how large the pool is; then what the artifact says.

    Raises CapacityError where not even one page and a scratch slab fit, or more than `budget` is needed; ArtifactError.
    """
    plan = plan_artifact(artifact, target, num_pages=num_pages, kv_pool_bytes=kv_pool_bytes, budget=budget)
    plan.check(1)
    return plan


def plan_artifact(artifact: Artifact, target: TargetInfo, *, num_pages: int | None = None, kv_pool_bytes: int | None = None,
                  budget: int | None = None) -> MemoryPlan:
    """The same unchecked. Raises ArtifactError."""
    manifest = artifact.manifest
    kv, params = manifest.target_level.kv, manifest.target_level.params
    if kv is None:
        raise ArtifactError(f"manifest.json: level '{manifest.target_level.name}' has no KV geometry; compile again")
    if num_pages is not None:
        kv_pool_bytes = num_pages * kv.page_bytes
    if kv_pool_bytes is None and budget is None:
        kv_pool_bytes, budget = params.get("kv_pool_bytes"), params.get("memory_bytes")
    return plan_memory(artifact_needs(artifact, target), manifest.limits, pool_bytes=kv_pool_bytes, budget=budget)


def artifact_needs(artifact: Artifact, target: TargetInfo) -> list[LevelNeed]:
    """What an artifact's levels take on a target. Raises ArtifactError."""
    needs = []
    for level in artifact.manifest.levels:
        programs = artifact.programs(level.name, target) if level.programs else {}
        taps = [tap for program in programs.values() for name, tap in program.taps.items() if name == "logits"]
        needs.append(LevelNeed(
            level.name, None if "kv_of" in level.params else level.kv, weight_bytes(artifact, level, target),
            max((program.arena_bytes for program in programs.values()), default=0),
            max((tap.num_bytes for tap in taps), default=0),
            input_widths(level.params, programs.values(), artifact.manifest.model.vocab_size), window_of(level.params),
            table_bytes(artifact, level, target)))
    return needs


def table_bytes(artifact: Artifact, level: LevelInfo, target: TargetInfo) -> int:
    """Of an n-gram level whose counts lie on the device."""
    if level.kind != "ngram" or "ngram_clear" not in target.kernels:
        return 0
    counts = level.params.get("counts")
    return device_bytes(level.params, artifact.manifest.limits, artifact.path(str(counts)).stat().st_size if counts else 0)


def weight_bytes(artifact: Artifact, level: LevelInfo, target: TargetInfo) -> int:
    """Of a level on a target. Raises ArtifactError."""
    if level.weights is None:
        return 0
    if target.name in level.other_weights:
        return artifact.level_weights(level.name, target.name).num_bytes
    return artifact.manifest.weights[level.weights][0]


def default_pool_bytes(sequence_bytes: int, limits: Limits) -> int:
    """Room for `max_num_seqs` full contexts, in at most a quarter of this machine's memory, but for one at least."""
    return max(sequence_bytes, min(limits.max_num_seqs * sequence_bytes, machine_bytes() // 4))


def machine_bytes() -> int:
    """This machine's memory; 8 GiB where it cannot be asked."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 << 30
    return found if found > 0 else 8 << 30


def buffer_bytes(limits: Limits, page_size: int, widths: Mapping[str, int] = NO_WIDTHS, tail: Tail | None = None) -> int:
    """Of the step inputs of one level."""
    widths = {**widths, **tail_widths(limits, tail)}
    return sum(int(np.prod(input_shape(name, limits, page_size, widths))) * np.dtype(dtype).itemsize for name, (dtype, _) in INPUTS.items())


def tail_pages(tail: Tail, context: int) -> int:
    """Wide pages of the tail of `context` tokens."""
    return min(-(-context // tail.page_size), tail.num_pages)


def context_bytes(kv: KvGeometry, context: int, window: KvWindow | None = None) -> int:
    """Of the pool, for `context` cached tokens of one sequence: whole pages, and those of the 16-bit tail where the format has one.

    With a window those of the gap are not counted.
    """
    wide = tail_pages(kv.tail, context) * kv.wide.page_bytes if kv.tail and kv.wide else 0
    start, end = (0, 0) if window is None else window.gap(context, kv.page_size)
    return (-(-context // kv.page_size) - (end - start)) * kv.page_bytes + wide


def effective_bits(kv: KvGeometry, context: int, window: KvWindow | None = None) -> float:
    """Bits that one cached element takes at this context, all of a sequence's committed bytes counted."""
    elements = 2 * kv.num_layers * kv.num_kv_heads * kv.head_dim * context
    return 8 * context_bytes(kv, context, window) / elements

