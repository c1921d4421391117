"""Tokenizers that do not fit their model are one line at compile; those that do pass."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from mlsdc.compiler.capture.source import ModelSource
from mlsdc.compiler.check_tokenizer import check_tokenizer
from mlsdc.compiler.errors import CaptureError
from tests.models.tiny import byte_tokenizer


def source(tokenizer: Tokenizer | None = None, **facts: Any) -> ModelSource:
    made = (tokenizer or byte_tokenizer()).to_str()
    nothing: Any = None
    plain = ModelSource("tiny", "tiny", "", {"model_type": "llama", "vocab_size": 256}, nothing, made, "", 256, None, ())
    return dataclasses.replace(plain, **facts)


def test_a_tokenizer_that_fits_passes() -> None:
    tokens = tuple(byte_tokenizer().id_to_token(i) for i in range(256))
    check_tokenizer(source(bos_token_id=0, eos_token_ids=(1, 255), tokens=tokens))


def test_more_tokens_than_the_embedding_has_rows_are_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<|end|>"])
    message = r"^tiny: the tokenizer has token '<\|end\|>' with id 256, the model's embedding has 256 rows$"
    with pytest.raises(CaptureError, match=message):
        check_tokenizer(source(tokenizer))


@pytest.mark.parametrize(("facts", "message"), [
    ({"eos_token_ids": (2, 300)}, "^tiny: eos_token_id 300 is no token of the tokenizer, whose ids end at 255$"),
    ({"bos_token_id": 256}, "^tiny: bos_token_id 256 is no token of the tokenizer, whose ids end at 255$"),
    ({"tokens": ("!", "?")}, "^tiny: token 1 is '\\?' in the source, '\"' in the tokenizer made from it$"),
    ({"tokenizer_json": "{}"}, r"^tiny: tokenizer\.json is not a tokenizer \("),
])  # fmt: skip
def test_ids_that_are_no_tokens_are_named(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        check_tokenizer(source(**facts))


def test_ids_that_do_not_come_back_are_refused() -> None:
    tokenizer = byte_tokenizer()
    parsed = json.loads(tokenizer.to_str())
    parsed["decoder"] = {"type": "Replace", "pattern": {"String": "q"}, "content": "k"}
    with pytest.raises(CaptureError, match=r"^tiny: the tokenizer makes \[.*\] of 'The quick brown fox, 3 t.*', but \[.*\] of what"):
        check_tokenizer(source(tokenizer_json=json.dumps(parsed)))


def test_a_normaliser_that_loses_text_is_no_error() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Lowercase()
    check_tokenizer(source(tokenizer))
