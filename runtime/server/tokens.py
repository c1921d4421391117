"""How single tokens read: what log probabilities show, and where a step's text is cut into one event a token."""

from __future__ import annotations

from typing import Any

from mlsdc.runtime.detokenize import ByteLevelStream
from mlsdc.runtime.request import Delta, TokenLogprobs
from mlsdc.runtime.tokenizer import Tokenizer


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of one token, special ones by their name."""
    vocabulary = tokenizer.vocabulary
    if isinstance(vocabulary.stream(), ByteLevelStream):
        return vocabulary.bytes_of(token)
    text = (tokenizer.tokenizer.id_to_token(token) or "").replace(*vocabulary.replace)
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes((int(text[3:5], 16),))
        except ValueError:
            pass
    return text.encode()


class TokenCutter:
    """Cuts the text of one choice's deltas at its tokens, so that n tokens are n pieces whatever a step brought.

    The text that may be shown is a beginning of the decoded one (a stop string is held back or cut off), so each piece ends where its
    token's decoding ends, or where the text to show does.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._stream = tokenizer.stream(skip_special_tokens=skip_special_tokens)
        self._decoded = 0  # characters
        self._shown = 0

    def cut(self, delta: Delta) -> list[str]:
        """One piece for each token; their join is the delta's text. A delta without tokens is one piece."""
        text, tokens = delta.text, delta.token_ids
        pieces: list[str] = []
        at = 0
        for token in tokens:
            self._decoded += len(self._stream.feed((token,)))
            end = min(max(self._decoded - self._shown, at), len(text))
            pieces.append(text[at:end])
            at = end
        if not pieces:
            pieces.append("")
        pieces[-1] += text[at:]
        self._shown += len(text)
        return pieces

    def cut_all(self, tokens: list[int], text: str) -> list[str]:
        """`cut` of a whole text: one piece for each token, none if there is none."""
        return self.cut(Delta(text, tokens, None)) if tokens else []


def chat_logprob(tokenizer: Tokenizer, entry: TokenLogprobs, top: int) -> dict[str, Any]:
    """One element of a chat choice's `logprobs.content`."""
    return {**_readable(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_readable(tokenizer, token, logprob) for token, logprob in entry.top[:top]]}


def _readable(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = token_bytes(tokenizer, token)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}


class CompletionLogprobs:
    """The `logprobs` object of a text completion, grown token by token."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self.tokenizer = tokenizer
        self.top = top
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, token: int, entry: TokenLogprobs | None, offset: int) -> None:
        """`entry` None: a prompt's first token, which nothing predicts. `offset`: where the token's text begins."""
        self.tokens.append(self._text(token))
        self.text_offset.append(offset)
        if entry is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(max(entry.logprob, -9999.0))
        best = {self._text(other): max(logprob, -9999.0) for other, logprob in reversed(entry.top[: self.top])}
        self.top_logprobs.append({**best, self._text(token): max(entry.logprob, -9999.0)})

    def take(self) -> dict[str, Any]:
        """Everything since the last time."""
        taken = {"tokens": self.tokens, "token_logprobs": self.token_logprobs, "top_logprobs": self.top_logprobs,
                 "text_offset": self.text_offset}
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return taken

    def _text(self, token: int) -> str:
        """Tokens that are no Unicode of their own are spelt as OpenAI spells them, so that two of them differ."""
        data = token_bytes(self.tokenizer, token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
