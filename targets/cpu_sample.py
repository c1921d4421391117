"""Native code around the target's forward program on the CPU: choices by law L1, and the n-gram level's counts."""

from __future__ import annotations

from mlsdc.targets.protocol import KernelSpec
from mlsdc.templates import params_sample as P


def ngram_specs(order: int) -> tuple[KernelSpec, ...]:
    """The functions of a live n-gram level (runtime.levels.ngram_native calls them)."""
    abi = {
        "ngram_observe": ("S: u64", "TOKENS: i32"),
        "ngram_rollback": ("S: u64",),
        "ngram_propose": ("LIVE: u64", "FIXED: u64", "TREE: i32", "P: f32", "budget: int", "width: int", "weight: float", "floor: float"),
    }
    return tuple(KernelSpec(name, P.Ngram(name, order), arguments) for name, arguments in abi.items())
