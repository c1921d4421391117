"""The launches on NVIDIA GPUs behind a step's choices: where they led, and what an n-gram level drafts from that."""

from __future__ import annotations

from mlsdc.runtime.program import InputArg
from mlsdc.runtime.step import Limits
from mlsdc.targets.protocol import Call, KernelSpec, Lowering
from mlsdc.templates.params_triton_ahead import Follow, Ngram, NgramClear

FOLLOW_INPUTS = ("header", "tokens", "row_slot", "ancestors", "seq_row", "seq_rows", "seq_out", "choices", "followed")


def follow_lowering(limits: Limits) -> Lowering:
    """One program a sequence, as many as there can be: one graph holds them."""
    abi = tuple(f"{name}: *{'i64' if name == 'ancestors' else 'i32'}" for name in FOLLOW_INPUTS)
    call = Call(KernelSpec("follow", Follow(), abi), limits.max_num_seqs, None, tuple(InputArg(name) for name in FOLLOW_INPUTS))
    return Lowering((call,), 0)


def ngram_specs(order: int) -> tuple[KernelSpec, ...]:
    """The kernels of an n-gram level (runtime/levels/ngram_ahead.py launches them)."""
    abi = {
        "ngram_observe": ("states: *i64", "control: *i32", "feed: *i32", "followed: *i32", "words: i32", "room: i32", "mask: i32",
                          "pairs: i32", "journal: i32", "history: i32"),
        "ngram_propose": ("states: *i64", "control: *i32", "followed: *i32", "entries: *i32", "kinds: *u8", "vocab: *i32", "scratch: *i32",
                          "results: *i32", "words: i32", "mask: i32", "history: i32", "slots: i32", "reach: i32", "nodes: i32",
                          "width: i32", "weight: f32", "floor: f32"),
    }
    clear = KernelSpec("ngram_clear", NgramClear(), ("states: *i64", "control: *i32", "words: i32"))
    return clear, *(KernelSpec(name, Ngram(name, order), arguments) for name, arguments in abi.items())
