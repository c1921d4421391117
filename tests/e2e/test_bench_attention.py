"""`python -m mlsdc.runtime.bench.attention`: that what it measures lies in memory, and that every figure answers. Never how fast."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlsdc.runtime.bench import STREAM_BLOCK
from mlsdc.runtime.bench.attention import Sequences, measure
from mlsdc.runtime.bench.stream import StreamRead
from mlsdc.runtime.errors import CapacityError


@pytest.fixture(autouse=True)
def _small_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamRead.__init__, "__defaults__", (8 * STREAM_BLOCK,))


def test_every_page_of_every_sequence_was_written(tiny: Path) -> None:
    """A page that was not would be the system's one page of zeros, which caches hold."""
    one = Sequences(tiny, 2, 40, 2, 1)
    pages = one.memory.buffers.page_table[:2].reshape(-1).tolist()
    assert len(set(pages)) == len(pages)
    assert all(one.memory.read_page(page).any() for page in pages)
    one.device.close()


def test_sequences_decode_alike_and_a_verify_is_of_one(tiny: Path) -> None:
    one = Sequences(tiny, 2, 40, 2, 1)
    one.set_decode()
    buffers = one.memory.buffers
    assert buffers.header[:3].tolist() == [2, 2, 2]
    buffers.tokens[:2] = 5
    one.forward.run()
    assert buffers.choices[0] == buffers.choices[1]  # the same page again and again: the same keys and values
    one.set_verify(2)
    assert buffers.header[:3].tolist() == [2, 1, 2]
    assert buffers.row_slot[:2].tolist() == [0, 1]
    one.device.close()


def test_every_figure_has_a_name_and_a_number(tiny: Path) -> None:
    figures = measure([tiny], 2, 40, 2, 1, 1)
    assert all(np.isfinite(figure.values).all() and figure.low >= 0 for figure in figures)
    assert len({figure.name for figure in figures}) == len(figures)


def test_more_than_the_limits_is_refused(tiny: Path) -> None:
    with pytest.raises(CapacityError, match="limits"):
        Sequences(tiny, 2, 1 << 20, 2, 1)
