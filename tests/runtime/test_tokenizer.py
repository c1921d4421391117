"""Text and chats to token ids, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer

from mlsdc.runtime.errors import ArtifactError, RequestError
from mlsdc.runtime.tokenizer import Tokenizer

TOKENIZER = byte_tokenizer()


def test_a_chat_is_rendered_for_the_assistants_turn() -> None:
    text = TOKENIZER.render_chat([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_of_a_template_are_single_ids() -> None:
    assert TOKENIZER.chat([{"role": "user", "content": "hi"}])[0] == TOKENIZER.tokenizer.token_to_id("<|im_start|>")


@pytest.mark.parametrize(("messages", "message"), [
    ([], "messages: empty"), ([{"content": "x"}], r"messages\[0\]"), ([{"role": "user"}], "no 'content'"), (["x"], r"messages\[0\]"),
])
def test_malformed_chats_are_named(messages: list[dict[str, str]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        TOKENIZER.chat(messages)


def test_a_template_that_refuses_says_why() -> None:
    strict = byte_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        strict.chat([{"role": "user", "content": "x"}])


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    hostile = byte_tokenizer(chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError):
        hostile.chat([{"role": "user", "content": "x"}])


def test_a_broken_template_is_the_artifacts_fault() -> None:
    with pytest.raises(ArtifactError, match="chat_template"):
        byte_tokenizer(chat_template="{% for %}").chat([{"role": "user", "content": "x"}])


def test_a_model_without_a_template_refuses_chats() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        byte_tokenizer(chat_template=None).chat([{"role": "user", "content": "x"}])


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(RequestError, match="Unicode"):
        TOKENIZER.encode("\ud800")


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.open(tmp_path / "tokenizer.json")
