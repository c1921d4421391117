"""Native code around the target's forward program on the CPU: choices by law L1, and the n-gram level's counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlsdc.runtime.program import ArenaArg, Arg, InputArg, IntArg, Tap
from mlsdc.runtime.step import Limits
from mlsdc.targets.protocol import Call, KernelSpec, Lowering
from mlsdc.templates import params_sample as P
from mlsdc.templates.params import padded
from mlsdc.templates.params_draft import Draft
from mlsdc.templates.params_heads import GuessDraws

SLACK = 256  # bytes that whole blocks of 64 logits may read beyond the last row


def ngram_specs(order: int) -> tuple[KernelSpec, ...]:
    """The functions of an n-gram level (runtime.levels.ngram_native calls them)."""
    abi = {
        "ngram_observe": ("S: u64", "TOKENS: i32"),
        "ngram_rollback": ("S: u64",),
        "ngram_propose": ("LIVE: u64", "ENTRIES: u32", "KINDS: u8", "VOCAB: i32", "TREE: i32", "P: f32", "slots: int", "reach: int",
                          "budget: int", "width: int", "coupled: int", "seed: int", "weight: float", "floor: float"),
    }
    return (*(KernelSpec(name, P.Ngram(name, order), arguments) for name, arguments in abi.items()), *draft_specs())


def guess_specs() -> tuple[KernelSpec, ...]:
    """The functions that levels with programs use on the host (runtime.levels.coupling calls the first)."""
    return (KernelSpec("guess_draws", GuessDraws(), ("SEED: u64", "TURN: i32", "TOKEN: i32", "E: f64", "k: int")), *draft_specs())


def draft_specs() -> tuple[KernelSpec, ...]:
    """The controller's functions (runtime.native_controller calls them)."""
    tree = ("STEP: f64", "LIST: i32", "TREE: i32", "PROB: f32", "LEVEL: i32", "DRAFTER: f64", "ALL: f64")
    abi = {
        "draft_choose": (*tree, "WORTH: f64", "RAW: f64", "RANGE: i32", "FACTOR: f64", "SEEN: f64", "CHANCE: f64", "GAIN: f64",
                         "SCRATCH: i32", "PICK: i32", "KEPT: i32", "KEPT_COUNT: i32", "ANC: u64", "levels: int"),
        "draft_learn": (*tree, "COMMITTED: i32", "COMMITTED_COUNT: i32", "BUDGET: i32", "WISH: i32", "levels: int"),
    }
    return tuple(KernelSpec(name, Draft(name), arguments) for name, arguments in abi.items())


def sample_lowering(logits: Tap, vocab_size: int, limits: Limits, base: int) -> tuple[Lowering, int]:
    """The launches that make the choices of rows that are not plain greedy, over the forward program's logits; bytes of arena they need.

    What they need beside the logits lies from `base` on, where the forward program uses nothing.
    """
    rows, n = padded(logits.shape[0], 8), logits.shape[1]
    sizes = {"edited": rows * n * 4 + SLACK, "list": rows * n * 4}
    part = P.Sample("sample_part", rows, n, vocab_size, limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_model_len)
    sizes |= {"best": rows * 4, "last_x": rows * 4, "last": rows * 4, "score": rows * part.parts * 8, "index": rows * part.parts * 4}
    places: dict[str, ArenaArg] = {}
    at = padded(base, 64)
    for name, size in sizes.items():
        places[name] = ArenaArg(at)
        at += padded(size, 64)
    x, edited = ArenaArg(logits.arena), IntArg((places["edited"].arena - logits.arena) // 4)

    def call(kernel: str, grid: int, arguments: Sequence[tuple[str, Arg]]) -> Call:
        spec = KernelSpec(kernel, replace(part, stem=kernel), tuple(abi for abi, _ in arguments))
        return Call(spec, grid, "OUT", tuple(arg for _, arg in arguments))

    state: list[tuple[str, Arg]] = [
        ("OUT: i32", InputArg("out_rows")), ("SEQ: i32", InputArg("row_seq")), ("POS: i32", InputArg("positions"))]
    record: list[tuple[str, Arg]] = [("RF: f64", InputArg("sampling")), ("RI: i32", InputArg("sampling"))]
    choice, best = ("CHOICE: i32", InputArg("choices")), ("BEST: i32", places["best"])
    cut: list[tuple[str, Arg]] = [("LAST_X: f32", places["last_x"]), ("LAST: i32", places["last"])]
    scores: list[tuple[str, Arg]] = [("SCORE: f64", places["score"]), ("INDEX: i32", places["index"])]
    where = ("edited: int", edited)
    calls = (
        call("sample_edit", 1, [
            ("X: f32", x), choice, best, *state, ("TOKENS: i32", InputArg("tokens")), ("ANC: u64", InputArg("ancestors")),
            ("FIRST: i32", InputArg("seq_row")), *record, ("BIAS_ID: i32", InputArg("bias_ids")), ("BIAS: f32", InputArg("bias")),
            ("BAN: i32", InputArg("ban_ids")), ("SEEN: i32", InputArg("seen_ids")), ("COUNT: i32", InputArg("seen_counts")),
            ("MASK: u32", InputArg("masks")), where]),
        call("sample_bound", 1, [("X: f32", x), best, *cut, ("LIST: i32", places["list"]), *state, *record, where]),
        call("sample_part", part.parts, [("X: f32", x), best, *cut, *scores, *state, *record, ("RU: u64", InputArg("sampling")), where]),
        call("sample_join", 1, [*scores, choice, *state[:2], record[0]]),
        call("sample_logprobs", 1, [
            ("X: f32", x), choice, ("GIVEN: i32", InputArg("given")), ("IDS: i32", InputArg("logprob_ids")),
            ("LOGP: f32", InputArg("logprobs")), ("LIST: i32", places["list"]), *state, record[1]]),
    )
    return Lowering(calls, 0), at + SLACK
