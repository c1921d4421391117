"""The launches on NVIDIA GPUs behind a step's choices: where they led, and what an n-gram level drafts from that."""

from __future__ import annotations

from mlsdc.runtime.program import InputArg
from mlsdc.targets.protocol import Call, KernelSpec, Lowering
from mlsdc.templates.params_triton_ahead import Follow

FOLLOW_INPUTS = ("header", "tokens", "row_slot", "ancestors", "seq_row", "seq_rows", "seq_out", "choices", "followed")


def follow_lowering() -> Lowering:
    """One program a sequence."""
    abi = tuple(f"{name}: *{'i64' if name == 'ancestors' else 'i32'}" for name in FOLLOW_INPUTS)
    call = Call(KernelSpec("follow", Follow(), abi), 1, "SEQS", tuple(InputArg(name) for name in FOLLOW_INPUTS))
    return Lowering((call,), 0)
