"""The launch with which trees of drafting levels grow on NVIDIA GPUs, round after round (runtime/levels/grown.py)."""

from __future__ import annotations

from mlsdc.compiler.module import LevelModule
from mlsdc.runtime.program import ArenaArg, Arg, InputArg, ProgramSpec
from mlsdc.runtime.step import Limits
from mlsdc.targets.protocol import Call, KernelSpec
from mlsdc.templates.params_triton_grow import Grow

INPUTS = {"header": "i32", "tokens": "i32", "positions": "i32", "row_seq": "i32", "row_slot": "i32", "ancestors": "i64", "seq_ctx": "i32",
          "seq_row": "i32", "seq_rows": "i32", "out_rows": "i32", "growth": "f64", "nodes": "i64", "grown": "i32"}


def grow_call(level: LevelModule, draft: ProgramSpec, limits: Limits, vocab_size: int) -> Call | None:
    """None for a level whose tree does not grow by rounds. Its program makes `top` and, if rows start from hidden states, `hidden`."""
    if "top" not in draft.taps:
        return None
    top, hidden = draft.taps["top"], draft.taps.get("hidden")
    widths = level.params.get("widths") or {}
    ids = int(widths.get("draft_ids", 0))
    params = Grow((top.shape[1] - 1) // 2, hidden.shape[1] if hidden else 0, ids, bool(ids) and level.kind == "model", vocab_size)
    args: list[tuple[str, Arg]] = [("top_ptr: *f32", ArenaArg(top.arena))]
    if hidden:
        args += [("hidden_ptr: *f32", ArenaArg(hidden.arena)), ("features: *f32", InputArg("features")),
                 ("rows_hidden: *f32", InputArg("rows_hidden"))]
    if ids:
        args.append(("draft_ids: *i32", InputArg("draft_ids")))
    args += [(f"{name}: *{type_}", InputArg(name)) for name, type_ in INPUTS.items()]
    abi = (*(entry for entry, _ in args), "round_: i32", "rounds: i32")
    return Call(KernelSpec(params.template, params, abi), limits.max_num_seqs, None, tuple(arg for _, arg in args))
