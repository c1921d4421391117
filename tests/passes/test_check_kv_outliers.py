"""Keys that a cache format would spoil get more bits, and only those."""

from __future__ import annotations

import numpy as np
import pytest

from mlsdc.compiler.kv_outliers import Layer, loss, outliers, with_outliers
from mlsdc.runtime.kv_format import format_named, parse_format

PAGE, TOKENS, DIM = 32, 48, 64


def layer(seed: int, spikes: tuple[int, ...] = (), size: float = 50.0) -> Layer:
    """Keys and queries of one head; `spikes` are channels of the keys that are `size` times as large as the others."""
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(TOKENS, 1, DIM)).astype(np.float32) for _ in range(2))
    k[:, :, list(spikes)] += size
    return Layer(q, k, DIM**-0.5)


PLAIN = [layer(seed) for seed in range(5)]


def test_ordinary_layers_are_left_alone() -> None:
    for name in ("int8", "fp8", "int4", "int4-token", "bf16", "int8/int4"):
        assert outliers(PLAIN, name, PAGE, {}) == []


def test_huge_channels_are_refused_to_a_token_at_a_time_and_left_to_channel_scales() -> None:
    layers = [*PLAIN[:2], layer(9, (5, 37)), *PLAIN[2:]]
    (found,) = outliers(layers, "int4-token", PAGE, {})
    assert (found.layer, found.found) == (2, "int4-token")
    assert found.given in ("int8", "bf16")
    assert "attention loses" in str(found)
    assert outliers(layers, "int4", PAGE, {}) == [], "a channel's own scale does not mind"


def test_what_is_given_loses_little() -> None:
    spiked = layer(9, (5, 37))
    (found,) = outliers([*PLAIN, spiked], "int4-token", PAGE, {})
    assert loss(spiked, format_named(f"{found.given}/int4-token"), PAGE) < loss(spiked, format_named("int4-token"), PAGE) / 10


def test_a_bias_ten_times_the_medians_is_an_outlier_though_the_calibration_saw_nothing() -> None:
    norms = {"the norm of its keys' bias": (22.0, 22.0, 605.0, 22.0, 22.0)}
    (found,) = outliers(PLAIN, "int8", PAGE, norms)
    assert (found.layer, found.given) == (2, "bf16")
    assert "bias is 605, the median layer's 22" in found.why


def test_layers_that_keep_16_bits_are_not_looked_at() -> None:
    layers = [*PLAIN[:2], layer(9, (5, 37)), *PLAIN[2:]]
    assert outliers(layers, "int4-token@2=bf16", PAGE, {}) == []


@pytest.mark.parametrize(("text", "values"), [
    ("int4-token", "int4-token"), ("int4-token/int8", "int8"), ("int4-token@0=bf16", "int4-token")])
def test_the_format_says_which_layers_differ(text: str, values: str) -> None:
    layers = [*PLAIN[:2], layer(9, (5, 37)), *PLAIN[2:]]
    (found,) = outliers(layers, text, PAGE, {})
    usual, others = parse_format(with_outliers(text, [found]))[0], dict(parse_format(with_outliers(text, [found]))[1])
    assert usual == parse_format(text)[0]
    assert (others.pop(2).keys.name, found.layer) == (found.given, 2)
    assert others == parse_format(text)[1]
    assert parse_format(with_outliers(text, [found]))[1][2].values.name == values


def test_values_do_not_decide() -> None:
    assert outliers(PLAIN, "bf16/int4-token", PAGE, {}) == []
