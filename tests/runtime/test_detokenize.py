"""Streamed text: valid UTF-8, and the full decode for every way of cutting."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from byte_tokenizer import byte_tokenizer, fallback_tokenizer, unknown_decoder
from hypothesis import given
from hypothesis import strategies as st

from mlsdc.runtime.detokenize import Vocabulary
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.tokenizer import Tokenizer

BYTE_LEVEL, MERGED, FALLBACK = byte_tokenizer(), byte_tokenizer(merges=True), fallback_tokenizer()
TEXTS = ["한국어 문장입니다", "family 👨‍👩‍👧‍👦!", "العربية", "plain the text", "é" * 5, "<tool>한국", "a<|im_end|>b"]
SIZES = st.lists(st.integers(1, 8), max_size=200)


def streamed(tokenizer: Tokenizer, tokens: list[int], sizes: list[int], *, skip: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=skip)
    rest = list(tokens)
    pieces = []
    for size in [*sizes, *[1] * len(tokens)]:
        pieces.append(stream.feed(rest[:size]))
        del rest[:size]
    return [*pieces, stream.flush()]


def ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.tokenizer.get_vocab_size() - 1), max_size=40)


@given(ids(MERGED), SIZES, st.booleans())
def test_any_byte_level_ids_stream_to_their_full_decode(tokens: list[int], sizes: list[int], skip: bool) -> None:
    assert "".join(streamed(MERGED, tokens, sizes, skip=skip)) == MERGED.tokenizer.decode(tokens, skip_special_tokens=skip)


@given(ids(FALLBACK), SIZES, st.booleans())
def test_any_byte_fallback_ids_stream_to_their_full_decode(tokens: list[int], sizes: list[int], skip: bool) -> None:
    assert "".join(streamed(FALLBACK, tokens, sizes, skip=skip)) == FALLBACK.tokenizer.decode(tokens, skip_special_tokens=skip)


@given(st.text(max_size=30), SIZES)
def test_any_text_comes_back(text: str, sizes: list[int]) -> None:
    tokens = BYTE_LEVEL.encode(text)
    assert "".join(streamed(BYTE_LEVEL, tokens, sizes, skip=False)) == text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [lambda t: [1] * len(t), lambda t: [2] * len(t), lambda t: [3, 1, 5] * len(t)])
def test_no_replacement_character_appears_at_a_border(text: str, make: Callable[[list[int]], list[int]]) -> None:
    tokens = MERGED.encode(text)
    assert "\ufffd" not in "".join(streamed(MERGED, tokens, make(tokens)))


def test_text_leaves_as_soon_as_it_is_certain() -> None:
    tokens = BYTE_LEVEL.encode("aé")
    assert streamed(BYTE_LEVEL, tokens, [1, 1, 1])[:3] == ["a", "", "é"]


def test_ids_beyond_the_vocabulary_read_as_nothing() -> None:
    assert BYTE_LEVEL.decode([97, 100_000, 98]) == "ab"


@pytest.mark.parametrize("tokenizer", [MERGED, FALLBACK])
def test_a_vocabulary_that_was_filled_reads_the_same(tokenizer: Tokenizer) -> None:
    tokens = list(range(tokenizer.tokenizer.get_vocab_size(with_added_tokens=True)))
    lazy, filled = Vocabulary(tokenizer.tokenizer), Vocabulary(tokenizer.tokenizer)
    filled.fill()
    for token in tokens:
        assert filled.stream().feed((token,)) == lazy.stream().feed((token,))
    assert filled.stream(skip_special_tokens=False).feed(tokens) == lazy.stream(skip_special_tokens=False).feed(tokens)


def test_a_decoder_that_cannot_be_streamed_exactly_is_refused() -> None:
    with pytest.raises(ArtifactError, match="decoder .* is not known"):
        Vocabulary(unknown_decoder())
