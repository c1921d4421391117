"""The noise of law L1 in numpy: a counter hash of (seed, position, token), so that no draw depends on another."""

from __future__ import annotations

import numpy as np

from mlsdc.runtime.step import Array

SEED_MASK = (1 << 64) - 1
_LOW = np.uint64(0xFFFFFFFF)


def philox(seed: int, words: tuple[int | Array, int | Array, int | Array, int | Array]) -> tuple[Array, Array, Array, Array]:
    """Philox4x32-10 (Salmon et al. 2011): four 32-bit words, as u64, of a counter's four words under a 64-bit key."""
    c0, c1, c2, c3 = (np.atleast_1d(np.asarray(word, np.uint64)) for word in words)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel(seed: int, t: int, tokens: Array) -> Array:
    """Gumbel(seed, t, token) f64: -log E, E = -log1p(-v), v the top 53 bits of the hash's first two words, plus one half, over 2^53."""
    c0, c1, _, _ = philox(seed, (t, np.asarray(tokens, np.uint64), 0, 0))
    v = (((c0 << np.uint64(32) | c1) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    with np.errstate(divide="ignore"):
        return np.asarray(-np.log(-np.log1p(-v)))


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice` of a request's `n`; choice 0 is the request alone."""
    if choice == 0:
        return seed & SEED_MASK
    c0, c1, _, _ = philox(seed & SEED_MASK, (0, choice, 1, 0))  # tokens' counters have 0 in the third word
    return int(c0[0]) << 32 | int(c1[0])
