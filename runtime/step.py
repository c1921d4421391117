"""The one native signature: fixed buffers that the scheduler fills before a step and every program of every level reads.

All arrays are allocated once, 64-byte aligned, at the artifact's limits, and never move: a launch list is bound to their addresses
at load (a CUDA graph is, too). A step sets the header's counts and the first entries of each array.

Rows of one sequence are contiguous, in order of scratch slot or position. A sequence of a step is either *drafted* (its rows are the last
committed token, slot 0, and the nodes of a tree; keys go to its scratch pages) or *prefilled* (its rows are committed tokens,
`row_slot` -1: a prompt's, or the last token of a sequence that drafts nothing; keys go to their pages at once).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.runtime.errors import CapacityError
from mlsdc.runtime.kv_tail import Tail

Array = npt.NDArray[Any]
Cell = memoryview  # of numbers
SCRATCH_SLOTS = 64
HEADER_WORDS = 16
SAMPLING_WORDS = 16  # of a sequence's sampling record (runtime/sampling/record.py)
MAX_BIAS = 1024  # logit_bias entries of a request
MAX_BANS = 128  # end tokens of a request that min_tokens masks
MAX_LOGPROBS = 20
LOGPROB_COLUMNS = 1 + MAX_LOGPROBS  # the chosen token and the most probable ones
BLOCK = 64  # positions per attention block (law L2)
FOLLOWED_WORDS = 4 + 2 * SCRATCH_SLOTS  # of a sequence (runtime/followed.py)


class Header(enum.IntEnum):
    """Words of `header` i32[16]. WORK is filled by the program itself (attention work items)."""

    ROWS = 0
    SEQS = 1
    OUT = 2
    COMMITS = 3
    WORK = 4
    GROUPS = 5
    LATER = 6  # of a list that grows trees: rows of each round after the first, at most


ROWS, SEQS, OUT, COMMITS, WORK, GROUPS, LATER = map(int, Header)  # for every step: looking up a member of an enum takes a microsecond


@dataclass(frozen=True)
class Limits:
    """Sizes an artifact was compiled for; `inspect` prints them, admission checks them."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logit_rows: int
    max_tree_nodes: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "max_tree_nodes" else 1
            if type(value) is not int or value < least:
                raise CapacityError(f"limits.{name}: {value!r}, expected an integer of at least {least}")

    def pages_per_seq(self, page_size: int) -> int:
        return -(-self.max_model_len // page_size)

    def scratch_pages(self, page_size: int) -> int:
        """Pages of a sequence's scratch slab: the last committed token and the largest tree."""
        return -(-(self.max_tree_nodes + 1) // page_size)


INPUTS: dict[str, tuple[str, str]] = {
    # name: (dtype, what its first axis counts)
    "header": ("i4", "words"),
    "tokens": ("i4", "rows"),  # token id of each row
    "positions": ("i4", "rows"),  # committed length + depth
    "row_seq": ("i4", "rows"),  # index of the row's sequence in this step
    "row_slot": ("i4", "rows"),  # scratch slot of a drafted row, -1 for a committed (prefill) row
    "ancestors": ("u8", "rows"),  # scratch slots the row reads, itself included: runtime.tree.ancestor_words; 0 for prefill rows
    "seq_ctx": ("i4", "seqs"),  # drafted: committed tokens that lie in pages; prefilled: position of its first row
    "seq_row": ("i4", "seqs"),  # first row of the sequence
    "seq_rows": ("i4", "seqs"),  # how many rows it has
    "seq_out": ("i4", "seqs"),  # the first entry in `choices` of those it follows, -1 if it wants none
    "page_table": ("i4", "seqs x pages_per_seq"),  # page of positions page_size * i ..
    "scratch_table": ("i4", "seqs x scratch_pages"),  # page of slots page_size * i ..; unused by prefilled sequences
    "tail_table": ("i4", "seqs x tail"),  # of a grouped format: wide pages: of the first tokens, then of the ring (runtime/kv_tail.py)
    "out_rows": ("i4", "out"),  # rows that want logits and a choice
    "choices": ("i4", "out"),  # result: the target's choice for each of them
    "followed": ("i4", "seqs x followed"),  # kept: where the choices led, by `follow` (runtime/followed.py)
    "sampling": ("f8", "seqs x sampling"),  # how each sequence's rows choose, read by `sample` only
    "bias_ids": ("i4", "seqs x bias"),  # logit_bias: tokens
    "bias": ("f4", "seqs x bias"),  # and what is added
    "ban_ids": ("i4", "seqs x bans"),  # end tokens, masked before min_tokens
    "seen_ids": ("i4", "seqs x ctx"),  # with penalties: the distinct tokens of prompt and output
    "seen_counts": ("i4", "seqs x ctx"),  # and how often each is in the output
    "given": ("i4", "out"),  # log probabilities: -2 none, -1 of the row's choice, else of this token (prompt_logprobs)
    "masks": ("u4", "out x masks"),  # rows with a grammar: bit t % 32 of word t // 32 says whether token t may come
    "logprob_ids": ("i4", "out x logprobs"),  # result: the chosen or given token, then the most probable ones, best first
    "logprobs": ("f4", "out x logprobs"),  # result: log probabilities by the raw logits
    "commit_src": ("i4", "commits"),  # token slots to copy: page * page_size + slot in the page
    "commit_dst": ("i4", "commits"),
    "group_page": ("i4", "groups"),  # of a grouped format: pages that `commit` fills, after the copies, from wide ones
    "group_seq": ("i4", "groups"),  # the row of tail_table that names those
    "group_first": ("i4", "groups"),  # position of the page's first token
    "features": ("f4", "rows x features"),  # a head's: hidden states that its rows start from
    "taps": ("f4", "rows x taps"),  # a head's: the target's hidden states of several layers, which become features
    "growth": ("f8", "seqs x growth"),  # how each sequence's tree grows on the device (runtime/levels/grown.py)
    "draft_ids": ("i4", "ids"),  # kept: the target's token of each draft token, where they differ
    "nodes": ("i8", "seqs x nodes"),  # kept: what a tree has so far
    "rows_hidden": ("f4", "seqs x hidden"),  # kept: hidden states of its rows, by scratch slot
    "grown": ("i4", "seqs x grown"),  # result: the tree
}
KEPT = frozenset({"followed", "draft_ids", "nodes", "rows_hidden"})  # neither brought to the device by a step nor taken from it


def mask_words(vocab_size: int) -> int:
    """Width of `masks` for a vocabulary."""
    return -(-vocab_size // 32)


def aligned(shape: tuple[int, ...], dtype: str, alignment: int = 64) -> Array:
    """A zeroed array whose data starts at a multiple of `alignment` bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)


class Cells:
    """The same memory as memoryviews of one dimension. A step writes and reads single numbers, and a memoryview is a third of what numpy
    costs for one; more where the caches are cold, as they are after a program that read all weights."""

    header: Cell
    tokens: Cell
    positions: Cell
    row_seq: Cell
    row_slot: Cell
    ancestors: Cell
    seq_ctx: Cell
    seq_row: Cell
    seq_rows: Cell
    seq_out: Cell
    page_table: Cell
    scratch_table: Cell
    tail_table: Cell
    out_rows: Cell
    choices: Cell

    def __init__(self, buffers: StepBuffers) -> None:
        for name in Cells.__annotations__:
            setattr(self, name, getattr(buffers, name).reshape(-1).data)


class StepBuffers:
    """The arrays of INPUTS, as attributes, for the given limits and page size."""

    header: Array
    tokens: Array
    positions: Array
    row_seq: Array
    row_slot: Array
    ancestors: Array
    seq_ctx: Array
    seq_row: Array
    seq_rows: Array
    seq_out: Array
    page_table: Array
    scratch_table: Array
    out_rows: Array
    choices: Array
    followed: Array
    sampling: Array
    bias_ids: Array
    bias: Array
    ban_ids: Array
    seen_ids: Array
    seen_counts: Array
    given: Array
    masks: Array
    logprob_ids: Array
    logprobs: Array
    commit_src: Array
    commit_dst: Array
    tail_table: Array
    group_page: Array
    group_seq: Array
    group_first: Array
    features: Array
    taps: Array
    growth: Array
    draft_ids: Array
    nodes: Array
    rows_hidden: Array
    grown: Array

    def __init__(self, limits: Limits, page_size: int, widths: Mapping[str, int] | None = None, tail: Tail | None = None) -> None:
        """`widths`: columns of inputs that not every level has; `tail`: of a grouped cache format."""
        if limits.max_tree_nodes >= SCRATCH_SLOTS:
            raise CapacityError(f"limits.max_tree_nodes: {limits.max_tree_nodes}, at most {SCRATCH_SLOTS - 1}")
        self.limits = limits
        self.page_size = page_size
        self.tail = tail
        widths = {**(widths or {}), **tail_widths(limits, tail)}
        for name, (dtype, _) in INPUTS.items():
            setattr(self, name, aligned(input_shape(name, limits, page_size, widths), dtype))

    @cached_property
    def cells(self) -> Cells:
        """Made when it is first asked for: a device may have put its own arrays in the place of these at load."""
        return Cells(self)


def tail_widths(limits: Limits, tail: Tail | None) -> dict[str, int]:
    """Widths of the inputs of a grouped cache format: scratch slabs lie in wide pages, and one commit fills at most so many groups."""
    if tail is None:
        return {}
    return {"scratch": limits.scratch_pages(tail.page_size), "tail": tail.num_pages, "groups": 1 + limits.max_tree_nodes // tail.group}


def input_shape(name: str, limits: Limits, page_size: int, widths: Mapping[str, int] = MappingProxyType({})) -> tuple[int, ...]:
    """Shape of a step input at the limits."""
    counts = {
        "words": (HEADER_WORDS,),
        "rows": (limits.max_num_batched_tokens,),
        "seqs": (limits.max_num_seqs,),
        "seqs x pages_per_seq": (limits.max_num_seqs, limits.pages_per_seq(page_size)),
        "seqs x scratch_pages": (limits.max_num_seqs, widths.get("scratch", limits.scratch_pages(page_size))),
        "seqs x tail": (limits.max_num_seqs, widths.get("tail", 0)),
        "groups": (limits.max_num_seqs * widths.get("groups", 0),),
        "seqs x followed": (limits.max_num_seqs, FOLLOWED_WORDS),
        "seqs x sampling": (limits.max_num_seqs, SAMPLING_WORDS),
        "seqs x bias": (limits.max_num_seqs, MAX_BIAS),
        "seqs x bans": (limits.max_num_seqs, MAX_BANS),
        "seqs x ctx": (limits.max_num_seqs, limits.max_model_len),
        "out": (limits.max_logit_rows,),
        "out x logprobs": (limits.max_logit_rows, LOGPROB_COLUMNS),
        "out x masks": (limits.max_logit_rows, widths.get("masks", 0)),
        "commits": (limits.max_num_batched_tokens,),
        "rows x features": (limits.max_num_batched_tokens, widths.get("features", 0)),
        "rows x taps": (limits.max_num_batched_tokens, widths.get("taps", 0)),
        "ids": (widths.get("draft_ids", 0),),
        **{f"seqs x {name}": (limits.max_num_seqs, widths.get(name, 0)) for name in ("growth", "nodes", "hidden", "grown")},
    }
    return counts[INPUTS[name][1]]
