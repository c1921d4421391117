"""A weight node's values, read from the checkpoint one node at a time: f32, or codes and scales where its type is packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.capture.source import Blocks, WeightSource
from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Node, Weight
from mlsdc.compiler.quantise import Q8, q8_from_gguf, quantise_q8
from mlsdc.compiler.types import DType, TensorType

Array = npt.NDArray[Any]
ROWS = 4096  # quantised at a time, so that the temporaries stay small beside the tensor


def read_weight(node: Node, weights: WeightSource) -> Array | Q8:
    """f32[n, k] (or [n]), or q8[n, k]; several sources are stacked along axis 0. Q8_0 blocks keep their codes and scales.

    Raises CaptureError for a tensor that cannot be read, CompileError for a type that weights cannot have.
    """
    if not isinstance(node.op, Weight) or not isinstance(node.type, TensorType):
        raise CompileError(f"%{node.name} is not a weight")
    if node.type.dtype is DType.F32:
        parts = [weights.read(name) for name in node.op.sources]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    if node.type.dtype is DType.Q8:
        packed = [part for name in node.op.sources for part in _read_q8(name, weights)]
        return Q8(np.concatenate([part.codes for part in packed]), np.concatenate([part.scales for part in packed]))
    raise CompileError(f"%{node.name}: weights of type {node.type.dtype} cannot be packed; f32 and q8 can")


def _read_q8(name: str, weights: WeightSource) -> list[Q8]:
    blocks: Blocks | None = weights.block(name)
    if blocks is not None and blocks.kind == "Q8_0":
        n, k = blocks.shape
        return [q8_from_gguf(blocks.rows, (n, k))]
    values = weights.read(name)
    return [quantise_q8(values[start : start + ROWS]) for start in range(0, len(values), ROWS)]
