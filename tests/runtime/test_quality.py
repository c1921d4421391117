"""Figures of a KV format, from logits known in advance: perplexity, KL and agreement are what their formulas say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_device import make_manifest

from mlsdc.runtime.bench.quality import aligned, evaluate, evaluation_text
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.step import Array, Limits

VOCAB, TOKENS = 13, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


class Known:
    """Scores any text with the logits it was given, in chunks of its own."""

    def __init__(self, logits: Array, chunk: int, vocab: int = VOCAB) -> None:
        self.logits = logits
        self.chunk = chunk
        self.name, self.path, self.sha256 = "known", Path("known.mlsdc"), "00"
        self.engine = SimpleNamespace(manifest=make_manifest(Limits(64, 1, 8, 8, 0), vocab=vocab))

    def rows(self, tokens: Sequence[int]) -> Iterator[tuple[int, Array]]:
        for start in range(0, len(tokens), self.chunk):
            yield start, self.logits[start : min(start + self.chunk, len(tokens))]


def random_logits(seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=(len(TOKENS), VOCAB + 3)).astype(np.float32) * 3


def test_figures_are_those_of_their_formulas() -> None:
    wanted, given = random_logits(0), random_logits(1)
    (found,) = evaluate(Known(wanted, 4), [Known(given, 5)], TOKENS, len(TOKENS))  # type: ignore[arg-type, list-item]
    p, q = (np.exp(x[:-1, :VOCAB].astype(np.float64)) for x in (wanted, given))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    kl = (p * np.log(p / q)).sum(1)
    nats = {name: -np.log(x[np.arange(len(TOKENS) - 1), TOKENS[1:]]).mean() for name, x in (("p", p), ("q", q))}
    assert found.rows == len(TOKENS) - 1
    assert found.kl == pytest.approx(kl.mean())
    assert found.max_kl == pytest.approx(kl.max())
    assert found.top1 == (p.argmax(1) == q.argmax(1)).mean()
    assert found.perplexity == pytest.approx(math.exp(nats["q"]))
    assert found.change == pytest.approx(math.exp(nats["q"] - nats["p"]) - 1)


def test_the_same_logits_have_a_kl_of_exactly_zero_whatever_chunks_they_come_in() -> None:
    logits = random_logits(2)
    for found in evaluate(Known(logits, 3), [Known(logits, 4), Known(logits, 11)], TOKENS, len(TOKENS)):  # type: ignore[arg-type, list-item]
        assert (found.kl, found.max_kl, found.change, found.top1) == (0.0, 0.0, 0.0, 1.0)


def test_every_window_starts_from_an_empty_cache() -> None:
    logits = random_logits(3)
    (found,) = evaluate(Known(logits, 2), [Known(logits, 3)], TOKENS, 5)  # type: ignore[arg-type, list-item]
    assert found.rows == 4 + 4 + 1  # windows of 5, 5 and 2 tokens; a window's last token is predicted and predicts nothing


def test_rows_that_one_artifact_lacks_are_an_error() -> None:
    with pytest.raises(MlsdcError, match="different numbers of rows"):
        list(aligned([Known(random_logits(0), 3).rows(TOKENS), Known(random_logits(0), 3).rows(TOKENS[:-2])]))


def test_artifacts_of_two_models_are_refused() -> None:
    with pytest.raises(MlsdcError, match="vocabularies of 12, 13 tokens"):
        evaluate(Known(random_logits(0), 3), [Known(random_logits(0), 3, vocab=12)], TOKENS, 5)  # type: ignore[arg-type, list-item]


def test_the_default_text_holds_the_default_number_of_tokens() -> None:
    assert len(evaluation_text()) > 8192 * 16
