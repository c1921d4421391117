"""A weight node's values, read from the checkpoint one node at a time: f32, or codes and scales where its type is packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.capture.source import Blocks, WeightSource
from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Node, Weight
from mlsdc.compiler.quantise import (
    F8,
    Q4,
    Q8,
    f8_from_blocks,
    q4_from_gguf,
    q4_from_gguf_symmetric,
    q4_from_int4,
    q8_from_gguf,
    q8_from_int4,
    quantise_f8,
    quantise_q4,
    quantise_q8,
)
from mlsdc.compiler.types import GROUP, DType, TensorType

Array = npt.NDArray[Any]
Packed = TypeVar("Packed", Q8, Q4, F8)
ROWS = 4096  # quantised at a time, so that the temporaries stay small beside the tensor
CANDIDATES = 8  # scales tried for each group of a 4-bit source
INT4 = ("int4", "int4 with zero points")
TO_Q4 = {"Q4_0": q4_from_gguf_symmetric, "Q4_1": q4_from_gguf, **dict.fromkeys(INT4, q4_from_int4)}


def read_weight(node: Node, weights: WeightSource) -> Array | Q8 | Q4 | F8:
    """f32[n, k] (or [n]; bf16 is rounded by whoever takes it), or q8, q4 or f8 [n, k]; several sources are stacked along axis 0.

    Blocks of the source are repacked, not quantised again: q8 takes Q8_0's and Q4_0's numbers as they are and keeps Q4_1's grid
    (`q8_on_grid`), q4 takes Q4_1's and Q4_0's as they are. int4 (AWQ, GPTQ, compressed-tensors)
    goes into q8 as it is, and into q4 with zero points rounded to f16; fp8 into f8 as it is.

    Raises CaptureError for a tensor that cannot be read, CompileError for a type that weights cannot have.
    """
    if not isinstance(node.op, Weight) or not isinstance(node.type, TensorType):
        raise CompileError(f"%{node.name} is not a weight")
    op = node.op
    if node.type.dtype in (DType.F32, DType.BF16):
        parts = [share(weights.read(name), op.shard) for name in op.sources]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    if node.type.dtype is DType.Q8:
        packed = [part for name in op.sources for part in shares(_read_q8(name, weights), op.shard)]
        return Q8(np.concatenate([part.codes for part in packed]), _factors(node, [part.scales for part in packed]))
    if node.type.dtype is DType.Q4:
        small = [part for name in op.sources for part in shares(_read_q4(name, weights), op.shard)]
        codes = np.concatenate([part.codes for part in small])
        return Q4(codes, _factors(node, [part.scales for part in small]), _factors(node, [part.mins for part in small]))
    if node.type.dtype is DType.F8:
        wide = [part for name in op.sources for part in shares(_read_f8(name, weights), op.shard)]
        return F8(np.concatenate([part.codes for part in wide]), np.concatenate([part.scales for part in wide]))
    raise CompileError(f"%{node.name}: weights of type {node.type.dtype} cannot be packed; f32, bf16, q8, q4 and f8 can")


def shares(parts: list[Packed], shard: tuple[int, ...]) -> list[Packed]:
    """A source's parts, one below the other, cut to the rank's share."""
    if not shard:
        return parts
    whole = type(parts[0])(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(parts[0])))
    axis, rank, ranks = shard
    if axis == 0:
        return [whole[part_of(len(whole.codes), rank, ranks)]]
    columns = part_of(whole.codes.shape[1], rank, ranks)
    groups = slice(columns.start // GROUP, columns.stop // GROUP)  # passes/shard.py splits at groups only
    by_row = isinstance(whole, F8)
    factors = [getattr(whole, field.name) for field in fields(whole)[1:]]
    return [type(whole)(whole.codes[:, columns], *(factor if by_row else factor[:, groups] for factor in factors))]


def share(values: Array, shard: tuple[int, ...]) -> Array:
    """The rank's share of plain numbers."""
    if not shard:
        return values
    axis, rank, ranks = shard
    part = part_of(values.shape[axis], rank, ranks)
    return np.ascontiguousarray(values[part] if axis == 0 else values[:, part])


def part_of(size: int, rank: int, ranks: int) -> slice:
    return slice(size // ranks * rank, size // ranks * (rank + 1))


def _read_q8(name: str, weights: WeightSource) -> list[Q8]:
    blocks: Blocks | None = weights.block(name)
    if blocks is not None and blocks.kind == "Q8_0":
        n, k = blocks.shape
        return [q8_from_gguf(blocks.rows, (n, k))]
    if blocks is not None and blocks.kind == "Q4_0":
        n, k = blocks.shape
        w = q4_from_gguf_symmetric(blocks.rows, (n, k))
        return [Q8(w.codes.astype(np.int8) - np.int8(8), w.scales)]
    if blocks is not None and blocks.kind == "Q4_1":
        n, k = blocks.shape
        rows = blocks.rows.reshape(n, -1)
        return [q8_on_grid(q4_from_gguf(part, (len(part), k))) for part in (rows[start : start + ROWS] for start in range(0, n, ROWS))]
    if blocks is not None and blocks.kind in INT4:
        n, k = blocks.shape
        return [q8_from_int4(blocks.rows, (n, k))]
    values = weights.read(name)
    return [quantise_q8(values[start : start + ROWS]) for start in range(0, len(values), ROWS)]


def _factors(node: Node, parts: Sequence[Array]) -> Array:
    """Scales or minima of all rows. Raises CompileError for values that f16 does not hold."""
    factors = np.concatenate(parts)
    if not np.isfinite(factors).all():
        raise CompileError(f"%{node.name}: has values too large for the f16 scales of {node.type}; `target.weights: bf16` holds them")
    return factors


def _read_q4(name: str, weights: WeightSource) -> list[Q4]:
    blocks: Blocks | None = weights.block(name)
    if blocks is not None and blocks.kind in TO_Q4:
        n, k = blocks.shape
        return [TO_Q4[blocks.kind](blocks.rows, (n, k))]
    values = weights.read(name)
    return [quantise_q4(values[start : start + ROWS]) for start in range(0, len(values), ROWS)]


def _read_f8(name: str, weights: WeightSource) -> list[F8]:
    blocks: Blocks | None = weights.block(name)
    if blocks is not None and blocks.kind == "fp8":
        n, k = blocks.shape
        return [f8_from_blocks(blocks.rows, (n, k))]
    values = weights.read(name)
    return [quantise_f8(values[start : start + ROWS]) for start in range(0, len(values), ROWS)]


def q8_on_grid(w: Q4) -> Q8:
    """q4 as q8 with scale d / k, k whole: then `d * q + m = scale * (k * q + m / scale)`, and only m's place on the finer grid is rounded.

    Of the CANDIDATES largest k, each group takes the one with the least error. That is a quarter of the squared error of quantising the
    values afresh. Groups that no k fits (one value only) are quantised afresh.
    """
    d, m = w.scales.astype(np.float32), w.mins.astype(np.float32)
    best_error, best_scale = np.full_like(d, np.inf), np.zeros_like(d)
    best_k, best_offset = np.zeros_like(d), np.zeros_like(d)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        largest = np.floor(127 * d / np.maximum(np.abs(m), np.abs(15 * d + m)))
        for step in range(CANDIDATES):
            k = largest - step
            scale = (d / k).astype(np.float16).astype(np.float32)
            offset = np.rint(m / scale)
            fits = (k >= 1) & (scale > 0) & (np.abs(offset) <= 127) & (np.abs(offset + 15 * k) <= 127)
            slope, shift = scale * k - d, scale * offset - m
            error = (shift + 7.5 * slope) ** 2 + 21.25 * slope**2  # mean square over q = 0..15
            better = fits & (error < best_error)
            for best, found in ((best_error, error), (best_scale, scale), (best_k, k), (best_offset, offset)):
                np.copyto(best, found, where=better)
    grouped = w.codes.reshape(*d.shape, GROUP)
    codes = (grouped * best_k.astype(np.int16)[..., None] + best_offset.astype(np.int16)[..., None]).astype(np.int8)
    scales = best_scale.astype(np.float16)
    left = ~np.isfinite(best_error)
    if left.any():
        fresh = quantise_q8(w.dequantise())
        codes[left] = fresh.codes.reshape(*d.shape, GROUP)[left]
        scales[left] = fresh.scales[left]
    return Q8(codes.reshape(w.codes.shape), scales)
