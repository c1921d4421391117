"""The default pipeline: every pass, in order, on one screen."""

from __future__ import annotations

from dataclasses import dataclass

from mlsdc.compiler.errors import ConfigError
from mlsdc.compiler.pipeline import Pass
from mlsdc.passes.fuse_attention import FuseAttention
from mlsdc.passes.fuse_gate_up import FuseGateUp
from mlsdc.passes.fuse_norm_quantise import FuseNormQuantise
from mlsdc.passes.fuse_qkv import FuseQkv
from mlsdc.passes.fuse_residual import FuseResidual
from mlsdc.passes.insert_paged_kv import InsertPagedKv
from mlsdc.passes.plan_cascade import PlanCascade
from mlsdc.passes.quantise_weights import QuantiseWeights
from mlsdc.passes.share_tree_mask import ShareTreeMask

__all__ = ["PassOptions", "default_pipeline"]

FREE_ROWS = {"int8": 8, "int4": 5, "none": 4}  # measured on a 2-core AVX-512 machine: a verify of so many rows costs about one row


@dataclass(frozen=True)
class PassOptions:
    """What the passes need to know. `disable` leaves passes out by name."""

    max_model_len: int
    weights: str = "int8"
    kv_format: str = "bf16"
    kv_page_size: int = 32
    disable: tuple[str, ...] = ()


def default_pipeline(options: PassOptions) -> tuple[Pass, ...]:
    """The passes in order, without those disabled. Raises ConfigError for a name that no pass has."""
    passes: tuple[Pass, ...] = (
        InsertPagedKv(options.max_model_len, options.kv_format, options.kv_page_size),
        ShareTreeMask(),
        QuantiseWeights(options.weights),
        FuseAttention(),
        FuseNormQuantise(),
        FuseQkv(),
        FuseGateUp(),
        FuseResidual(),
        PlanCascade(FREE_ROWS[options.weights]),
    )
    names = [pass_.name for pass_ in passes]
    for name in options.disable:
        if name not in names:
            raise ConfigError(f"passes.disable: '{name}' is not a pass; passes are {', '.join(names)}")
    return tuple(pass_ for pass_ in passes if pass_.name not in options.disable)
