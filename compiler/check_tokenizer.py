"""A tokenizer that does not fit its model is found out when compiling, not in what is served."""

from __future__ import annotations

from typing import Any

from mlsdc.compiler.capture.source import ModelSource
from mlsdc.compiler.errors import CaptureError

TEXTS = (
    "The quick brown fox, 3 times.",
    "def f(x):\n\treturn x ** 2  # two spaces\n",
    'Élan vital: "naïve" — 北京, мир 🙂',
    "\n\n  leading and trailing  ",
)


def check_tokenizer(source: ModelSource) -> None:
    """Ids have rows in the embedding, special tokens exist, what is decoded encodes to the same ids, and a vocabulary that the source gives
    as a list (GGUF) is the tokenizer's own. Raises CaptureError, one line."""
    from tokenizers import Tokenizer

    try:
        tokenizer: Any = Tokenizer.from_str(source.tokenizer_json)
    except Exception as error:  # the library raises plain Exception
        raise CaptureError(f"{source.label}: tokenizer.json is not a tokenizer ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    rows = int(source.config["vocab_size"])
    check_ids(source, tokenizer, rows)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        again = tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=False), add_special_tokens=False).ids
        if again != ids:
            raise CaptureError(f"{source.label}: the tokenizer makes {ids[:8]} of {text[:24]!r}, but {again[:8]} of what these ids say")


def check_ids(source: ModelSource, tokenizer: Any, rows: int) -> None:
    last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if last >= rows:
        token = tokenizer.id_to_token(last)
        raise CaptureError(f"{source.label}: the tokenizer has token {token!r} with id {last}, the model's embedding has {rows} rows")
    for what, ids in (("bos_token_id", (source.bos_token_id,)), ("eos_token_id", source.eos_token_ids)):
        for token_id in ids:
            if token_id is not None and tokenizer.id_to_token(token_id) is None:
                raise CaptureError(f"{source.label}: {what} {token_id} is no token of the tokenizer, whose ids end at {last}")
    for token_id, token in enumerate(source.tokens):
        if tokenizer.id_to_token(token_id) != token:
            found = tokenizer.id_to_token(token_id)
            raise CaptureError(f"{source.label}: token {token_id} is {token!r} in the source, {found!r} in the tokenizer made from it")
