"""`mlsdc chat`: answers, commands, and a conversation that is remembered."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))

from byte_tokenizer import byte_tokenizer
from fake_device import continuation, make_engine

from mlsdc.compiler.cli_chat import Chat, add_arguments
from mlsdc.runtime.engine import Engine

TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.tokenizer.get_vocab_size()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with make_engine(None, vocab=VOCAB, tokenizer=TOKENIZER, max_model_len=400, num_pages=400) as engine:
        yield engine


def talk(engine: Engine, lines: list[str], *options: str) -> Chat:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    left = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    chat = Chat(engine, parser.parse_args(["x", "--max-tokens", "12", *options]), read=read)
    chat.run()
    return chat


def said(messages: list[dict[str, str]]) -> str:
    return TOKENIZER.decode(continuation(TOKENIZER.chat(messages), 12, VOCAB))


def test_the_second_answer_knows_the_first(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    talk(engine, ["hi", "", "and?"])
    first = said([{"role": "user", "content": "hi"}])
    second = said([{"role": "user", "content": "hi"}, {"role": "assistant", "content": first}, {"role": "user", "content": "and?"}])
    assert capsys.readouterr().out == f"{first}\n{second}\n\n"


def test_commands(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk(engine, [
        "/stats", "hi", "/stats", "/system be brief", "hi", "/speculation off", "/temperature 0.5", "/nope", "/help", "/quit", "hi"])
    found = capsys.readouterr()
    assert found.out == said([{"role": "user", "content": "hi"}]) + "\n" + said(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]) + "\n"
    assert "no answer yet" in found.err
    assert "decode     12 tokens in 11 steps" in found.err
    assert "/nope : not a command" in found.err
    assert (chat.speculation, chat.temperature) == (False, 0.5)


def test_a_refused_message_is_one_line_and_is_forgotten(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk(engine, ["x" * 500, "hi"])
    found = capsys.readouterr()
    assert found.err.startswith("prompt: ")
    assert found.err.count("\n") == 1
    assert len(chat.messages) == 2
