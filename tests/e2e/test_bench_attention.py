"""`python -m mlsdc.runtime.bench.attention`: that what it measures lies in memory, and that every figure answers. Never how fast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlsdc.runtime.bench import STREAM_BLOCK
from mlsdc.runtime.bench.attention import Sequences, measure
from mlsdc.runtime.bench.stream import StreamRead
from mlsdc.runtime.errors import CapacityError
from tests.laws.formats import tiny_of


@pytest.fixture(autouse=True)
def _small_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamRead.__init__, "__defaults__", (8 * STREAM_BLOCK,))


@pytest.fixture(scope="module", params=["16 bits", "grouped"])
def sequences(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequences]:
    """Two of 100 tokens, or of as many as the artifact takes: of the grouped format some are read as quantised, some from the ring."""
    path = request.getfixturevalue("tiny") if request.param == "16 bits" else tiny_of(tmp_path_factory, "grouped")
    with Sequences(path, 2, 40 if request.param == "16 bits" else 100, 2, 1) as opened:
        yield opened


def test_every_page_of_every_sequence_was_written(sequences: Sequences) -> None:
    """A page that was not would be the system's one page of zeros, which caches hold."""
    sequences.set_decode()
    pages = sequences.memory.buffers.page_table[:2].reshape(-1).tolist()
    assert len(set(pages)) == len(pages)
    assert all(sequences.memory.read_page(page).any() for page in pages)


def test_sequences_decode_alike_and_a_verify_is_of_one(sequences: Sequences) -> None:
    sequences.set_decode()
    buffers = sequences.memory.buffers
    assert buffers.header[:3].tolist() == [2, 2, 2]
    buffers.tokens[:2] = 5
    sequences.forward.run()
    assert buffers.choices[0] == buffers.choices[1]  # the same page again and again: the same keys and values
    logits = sequences.forward.tap("logits")[:2]
    assert logits[0].any()
    assert logits[0].tobytes() == logits[1].tobytes()
    sequences.set_verify(2)
    assert buffers.header[:3].tolist() == [2, 1, 2]
    assert buffers.row_slot[:2].tolist() == [0, 1]


def test_sequences_of_other_tokens_decode_otherwise(sequences: Sequences) -> None:
    sequences.set_decode()
    sequences.memory.buffers.tokens[:2] = 5, 6
    sequences.forward.run()
    logits = sequences.forward.tap("logits")
    assert logits[0].tobytes() != logits[1].tobytes()


def test_every_figure_has_a_name_and_a_number(tiny: Path) -> None:
    figures = measure([tiny], 2, 40, 2, 1, 1)
    assert all(np.isfinite(figure.values).all() and figure.low >= 0 for figure in figures)
    assert len({figure.name for figure in figures}) == len(figures)


def test_more_than_the_limits_is_refused(tiny: Path) -> None:
    with pytest.raises(CapacityError, match="limits"):
        Sequences(tiny, 2, 1 << 20, 2, 1)
