"""The default pipeline: every pass, in order, on one screen. What follows it is per target: select_kernels, plan_buffers, emit_program."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from mlsdc.compiler.calibrate import Calibration
from mlsdc.compiler.errors import ConfigError
from mlsdc.compiler.pipeline import Pass
from mlsdc.passes.calibrate_activations import CalibrateActivations
from mlsdc.passes.check_kv_outliers import CheckKvOutliers
from mlsdc.passes.eliminate_common import EliminateCommon
from mlsdc.passes.eliminate_dead import EliminateDead
from mlsdc.passes.even_heads import EvenHeads
from mlsdc.passes.fold_constants import FoldConstants
from mlsdc.passes.fuse_attention import FuseAttention
from mlsdc.passes.fuse_gate_up import FuseGateUp
from mlsdc.passes.fuse_norm_quantise import FuseNormQuantise
from mlsdc.passes.fuse_qkv import FuseQkv
from mlsdc.passes.fuse_residual import FuseResidual
from mlsdc.passes.gather_early import GatherEarly
from mlsdc.passes.guess_top import GuessTop
from mlsdc.passes.insert_paged_kv import InsertPagedKv
from mlsdc.passes.plan_cascade import PlanCascade
from mlsdc.passes.quantise_weights import QuantiseWeights
from mlsdc.passes.raise_attention import RaiseAttention
from mlsdc.passes.raise_names import RaiseNames
from mlsdc.passes.raise_norm import RaiseNorm
from mlsdc.passes.raise_rope import RaiseRope
from mlsdc.passes.rowify import Rowify
from mlsdc.passes.shard import Shard
from mlsdc.passes.share_tree_mask import ShareTreeMask
from mlsdc.passes.tap_hidden import TapHidden
from mlsdc.runtime.step import Limits

__all__ = ["PassOptions", "default_pipeline"]


@dataclass(frozen=True)
class PassOptions:
    """What the passes need to know. `vocab_size` 0: every id of the head may be chosen. `disable` leaves passes out by name.

    Without a `calibration` no activations get a second plane and no keys more bits; `kv_norms` are numbers a layer that say which keys
    may need them.
    """

    limits: Limits = Limits(max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=256, max_logit_rows=64, max_tree_nodes=7)
    vocab_size: int = 0
    weights: str = "int8"
    kv_format: str = "bf16"
    kv_page_size: int = 32
    calibration: Calibration | None = None
    kv_norms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    tensor_parallel: int = 1
    disable: tuple[str, ...] = ()


def default_pipeline(options: PassOptions) -> tuple[Pass, ...]:
    """The passes in order, without those disabled. Raises ConfigError for a name that no pass has."""
    limits = options.limits
    passes: tuple[Pass, ...] = (
        FoldConstants(),
        EliminateCommon(),
        EliminateDead(),
        # a captured graph becomes a decoder's row program
        RaiseNorm(),
        RaiseRope(),
        RaiseAttention(),
        Rowify(limits.max_num_batched_tokens, limits.max_logit_rows, options.vocab_size),
        RaiseNames(),
        GatherEarly(),
        GuessTop(),
        TapHidden(),
        CalibrateActivations(options.calibration if options.weights in ("int8", "int4") else None),
        # cache and weights
        EvenHeads(),
        CheckKvOutliers(options.kv_format, options.kv_page_size, options.calibration, options.kv_norms),
        Shard(options.tensor_parallel),
        InsertPagedKv(limits.max_model_len, options.kv_format, options.kv_page_size),
        ShareTreeMask(),
        QuantiseWeights(options.weights),
        # fusions; any of them may be left out
        FuseAttention(),
        FuseNormQuantise(),
        FuseQkv(),
        FuseGateUp(),
        FuseResidual(),
        PlanCascade(),
    )
    check_disabled(options.disable, tuple(pass_.name for pass_ in passes))
    return tuple(pass_ for pass_ in passes if pass_.name not in options.disable)


def check_disabled(disable: tuple[str, ...], names: tuple[str, ...]) -> None:
    for name in disable:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            meant = f" (did you mean '{close[0]}'?)" if close else ""
            raise ConfigError(f"passes.disable: '{name}' is not a pass{meant}; passes are {', '.join(names)}")
