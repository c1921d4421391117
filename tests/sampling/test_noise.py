"""The noise of law L1."""

from __future__ import annotations

import numpy as np
import pytest

from mlsdc.runtime.sampling.noise import choice_seed, gumbel, philox

MAX = 0xFFFFFFFF


@pytest.mark.parametrize(("key", "counter", "expected"), [
    (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((1 << 64) - 1, (MAX, MAX, MAX, MAX), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])
def test_philox_gives_the_known_answers_of_random123(key: int, counter: tuple[int, int, int, int], expected: tuple[int, ...]) -> None:
    assert tuple(int(word[0]) for word in philox(key, counter)) == expected


def test_noise_is_gumbel() -> None:
    noise = gumbel(1, 2, np.arange(200_000))
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.03)


def test_seeds_positions_and_tokens_have_noise_of_their_own() -> None:
    drawn = {float(gumbel(seed, t, np.array([token]))[0]) for seed in (0, 1, 1 << 32) for t in (0, 1, 5) for token in (0, 1, 5)}
    assert len(drawn) == 27


def test_choice_0_of_n_is_the_request_alone_and_the_others_differ() -> None:
    assert choice_seed(5, 0) == 5
    assert choice_seed(-1, 0) == (1 << 64) - 1
    assert len({choice_seed(5, i) for i in range(100)} | {choice_seed(6, i) for i in range(100)}) == 200
