"""A needle in a long context: what a format loses of it does not grow with the context, if sums are kept in f32."""

from __future__ import annotations

import numpy as np
import pytest

from mlsdc.compiler.kv_outliers import F32, restored
from mlsdc.runtime.kv_format import format_named

DIM, PAGE, SCORE = 64, 32, 16.0  # the needle's score; those of the others are about 1 in size


def found(context: int, format: str, seed: int = 0) -> float:
    """Relative error of what attention over a quantised cache brings of one needle among `context` tokens."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=DIM).astype(np.float32)
    k, v = (rng.normal(size=(context, DIM)).astype(np.float32) for _ in range(2))
    k[context // 3] = q * SCORE / (q @ q) * DIM**0.5
    kv = format_named(format)
    exact = attend(q, k, v)
    return float(np.linalg.norm(attend(q, restored(kv.keys, k, PAGE), restored(kv.values, v, PAGE)) - exact) / np.linalg.norm(exact))


def attend(q: F32, k: F32, v: F32) -> F32:
    p = np.exp((k @ q) * DIM**-0.5 - SCORE)
    return np.asarray(p @ v / p.sum(), np.float32)


@pytest.mark.parametrize(("format", "most"), [("int8", 0.01), ("fp8", 0.04), ("int4", 0.1)])
def test_the_error_is_flat_from_1k_to_32k(format: str, most: float) -> None:
    short, long = (found(context, format) for context in (1024, 32768))
    assert short < most
    assert long <= 1.2 * short


def summed(terms: F32, bits: int, flush: int) -> float:
    """Terms added one after the other with a mantissa of `bits`, cut off, into a sum that goes to f32 every `flush` terms."""
    total, part = np.float32(0), 0.0
    for i, term in enumerate(terms.tolist(), 1):
        part += term
        if part:
            unit = 2.0 ** (np.floor(np.log2(abs(part))) - bits)
            part = float(np.trunc(part / unit) * unit)
        if i % flush == 0 or i == len(terms):
            total, part = np.float32(total + np.float32(part)), 0.0
    return float(total)


def test_short_sums_of_fp8_lose_a_long_context_and_sums_flushed_to_f32_do_not() -> None:
    """Hopper's fp8 products are added with 13 bits: each block of 64 positions must go to f32 (FIELD C10)."""
    errors = {}
    for context in (1024, 16384):
        v = np.abs(np.random.default_rng(1).normal(size=context)).astype(np.float32) / context
        exact = float(v.astype(np.float64).sum())
        errors[context] = [abs(summed(v, 13, flush) - exact) / exact for flush in (context, 64)]
    assert errors[16384][0] > 0.2 > 10 * errors[16384][1]
    assert errors[16384][1] <= 1.2 * errors[1024][1]
