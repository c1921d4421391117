"""The launches on NVIDIA GPUs that make the choices of rows that are not plain greedy, by law L1."""

from __future__ import annotations

from collections.abc import Sequence

from mlsdc.runtime.program import ArenaArg, Arg, InputArg, IntArg, Tap
from mlsdc.runtime.step import Limits
from mlsdc.targets.protocol import Call, KernelSpec, Lowering
from mlsdc.templates.params_triton_sample import Sample

ALIGNMENT = 64


def aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def sample_lowering(logits: Tap, vocab_size: int, limits: Limits, base: int) -> tuple[Lowering, int]:
    """Launches over the forward program's logits, and the bytes of arena they need; their own buffers lie from `base` on."""
    rows, n = logits.shape
    parts = Sample("sample_part", n, vocab_size, limits.max_model_len).parts
    sizes = dict.fromkeys(("best", "last_x", "last"), rows * 4)
    sizes |= {"edited": rows * n * 4, "score": rows * parts * 8, "index": rows * parts * 4}
    places: dict[str, ArenaArg] = {}
    at = aligned(base)
    for name, size in sizes.items():
        places[name] = ArenaArg(at)
        at += aligned(size)

    def call(template: str, grid: int, arguments: Sequence[tuple[str, Arg]]) -> Call:
        spec = KernelSpec(template, Sample(template, n, vocab_size, limits.max_model_len), tuple(abi for abi, _ in arguments))
        return Call(spec, grid, "OUT", tuple(arg for _, arg in arguments))

    def step(*names: str, **types: str) -> list[tuple[str, Arg]]:
        return [(f"{name}: *{types.get(name, 'i32')}", InputArg(name)) for name in names]

    x: tuple[str, Arg] = ("x_ptr: *f32", ArenaArg(logits.arena))
    edited: tuple[str, Arg] = ("edited: i32", IntArg((places["edited"].arena - logits.arena) // 4))
    best: tuple[str, Arg] = ("best_ptr: *i32", places["best"])
    cut: list[tuple[str, Arg]] = [("last_x_ptr: *f32", places["last_x"]), ("last_ptr: *i32", places["last"])]
    scores: list[tuple[str, Arg]] = [("score_ptr: *f64", places["score"]), ("index_ptr: *i32", places["index"])]
    row = step("header", "out_rows", "row_seq")
    sampling = step("sampling", sampling="f64")
    calls = (
        call("sample_edit", 1, [
            x, best, *row, *sampling, *step(
                "choices", "positions", "tokens", "ancestors", "seq_row", "bias_ids", "bias", "ban_ids", "seen_ids", "seen_counts", "masks",
                ancestors="i64", bias="f32"), edited]),
        call("sample_bound", 1, [x, best, *cut, *row, *sampling, edited]),
        call("sample_part", parts, [x, best, *cut, *scores, *row, *sampling, *step("positions"), edited]),
        call("sample_join", 1, [*scores, *row, *sampling, *step("choices")]),
        call("sample_logprobs", 1, [x, *row, *sampling, *step("choices", "given", "logprob_ids", "logprobs", logprobs="f32")]),
    )
    return Lowering(calls, 0), at
