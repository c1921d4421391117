"""The launches with which trees of drafting levels grow on NVIDIA GPUs, round after round (runtime/levels/grown.py), and those with which
levels draft behind the target's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlsdc.compiler.module import LevelModule
from mlsdc.runtime.kv_window import window_of
from mlsdc.runtime.levels.grown import PROGRAM
from mlsdc.runtime.program import ArenaArg, Arg, InputArg, ProgramSpec, TargetArenaArg, TargetInputArg
from mlsdc.runtime.step import Limits
from mlsdc.targets.protocol import Call, KernelSpec
from mlsdc.templates.params_triton_grow import AheadRows, BringRows, Grow

INPUTS = {"header": "i32", "tokens": "i32", "positions": "i32", "row_seq": "i32", "row_slot": "i32", "ancestors": "i64", "seq_ctx": "i32",
          "seq_row": "i32", "seq_rows": "i32", "out_rows": "i32", "growth": "f64", "nodes": "i64", "grown": "i32"}
AHEAD_INPUTS = ("header", "tokens", "positions", "row_seq", "row_slot", "ancestors", "seq_row", "seq_rows", "out_rows", "growth", "grown")


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


def ahead_calls(level: LevelModule, programs: Mapping[str, ProgramSpec], target: Mapping[str, ProgramSpec], limits: Limits
                ) -> Sequence[Call | str] | None:
    """Rows of what the step has committed, then the level's own programs. None for one that needs the target's commit first (its rows lie
    in the target's pages), for one that calls tokens otherwise than the target, and where rows that are kept for a step and not committed
    would move what is held: a window, a ring of recent tokens."""
    if "follow" not in target or "draft" not in programs or "kv_of" in level.params:
        return None
    if window_of(level.params) is not None or (level.kv is not None and level.kv.tail is not None):
        return None
    states = [target["forward"].taps[f"hidden.{tap}"] for tap in level.params.get("taps", ())]
    last = PROGRAM if PROGRAM in programs else "draft"
    if not states and (last == "draft" or (level.params.get("widths") or {}).get("draft_ids")):
        return None
    params = AheadRows(len(states), states[0].shape[1] if states else 0, last == "draft")
    fused = programs.get("fuse")
    args: list[tuple[str, Arg]] = [(f"hidden{i}_ptr: *f32", TargetArenaArg(state.arena)) for i, state in enumerate(states)]
    if states:
        args.append(("y_ptr: *f32", InputArg("taps" if fused else "features")))
    args.append(("followed: *i32", TargetInputArg("followed")))
    args += [(f"{name}: *{INPUTS[name]}", InputArg(name)) for name in AHEAD_INPUTS]
    spec = KernelSpec(params.template, params, tuple(abi for abi, _ in args))
    first = Call(spec, limits.max_num_seqs, None, tuple(arg for _, arg in args))
    if fused is None:
        return [first, last]
    made = fused.taps["features"]
    bring = BringRows(made.shape[1])
    abi = ("x_ptr: *f32", "header: *i32", "y_ptr: *f32")
    brought = Call(KernelSpec(bring.template, bring, abi), 1, "ROWS", (ArenaArg(made.arena), InputArg("header"), InputArg("features")))
    return [first, "fuse", brought, last]
