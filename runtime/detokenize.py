"""Token ids to text, a few at a time: valid UTF-8 only, and the same text however the ids are cut.

Text leaves as soon as it is certain. A byte-level vocabulary decodes to bytes, and a UTF-8 decoder keeps an unfinished character back;
a vocabulary with byte fallback (SentencePiece) keeps a run of byte tokens back until it ends, because one bad byte spoils its whole run.
`"".join(feed(...), ..., flush())` equals the tokenizer's full decode.
"""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mlsdc.runtime.errors import ArtifactError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HfTokenizer


class Detokenizer(ABC):
    """One stream. `feed` returns the text that became certain, `flush` the rest."""

    @abstractmethod
    def feed(self, tokens: Sequence[int]) -> str: ...

    @abstractmethod
    def flush(self) -> str: ...


class Vocabulary:
    """What all streams of a tokenizer share: how one token reads. Made once; `stream` starts a detokenizer."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        """Raises ArtifactError for a decoder that cannot be streamed exactly."""
        self.tokenizer = tokenizer
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}  # the library's way to its JSON
        self.special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self.whole: dict[int, str | None] = {}  # text of a byte-level token that is UTF-8 by itself, None for those that are not
        self._make: Callable[[frozenset[int]], Detokenizer]
        steps = [step["type"] for step in decoder.get("decoders", [decoder]) if step]
        self._byte_level = steps == ["ByteLevel"]
        if self._byte_level:
            self._make = lambda skipped: ByteLevelStream(self, skipped)
        elif steps in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
            self.replace = _replacement(decoder["decoders"][0])
            self.strip = decoder["decoders"][3]["start"] if len(steps) == 4 else 0
            if len(steps) == 4 and (decoder["decoders"][3]["content"] != " " or decoder["decoders"][3]["stop"]):
                raise ArtifactError("tokenizer.json: decoder.decoders[3]: only leading spaces can be stripped")
            self._make = lambda skipped: ByteFallbackStream(self, skipped)
        else:
            raise ArtifactError(
                f"tokenizer.json: decoder {steps or 'none'} is not known; known are ByteLevel and Replace + ByteFallback + Fuse (+ Strip)")

    def stream(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        return self._make(self.special if skip_special_tokens else frozenset())

    def fill(self) -> None:
        """Work out now how every token reads: a tenth of a second, instead of 20 us in the first step that brings each of them."""
        if self._byte_level:
            for token in range(self.tokenizer.get_vocab_size(with_added_tokens=True)):
                self.bytes_of(token)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a byte-level token; ids beyond the vocabulary read as nothing."""
        found = self._bytes.get(token)
        if found is None:
            text = self.tokenizer.id_to_token(token) or ""
            try:
                found = codecs.charmap_encode(text, "strict", _byte_of_code())[0]
            except UnicodeEncodeError:  # an added token, spelt as it is
                found = text.encode()
            self._bytes[token] = found
            try:
                self.whole[token] = found.decode()
            except UnicodeDecodeError:
                self.whole[token] = None
        return found


class ByteLevelStream(Detokenizer):
    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        self.vocabulary = vocabulary
        self.skipped = skipped
        self.pending = b""  # of an unfinished character

    def feed(self, tokens: Sequence[int]) -> str:
        skipped = self.skipped
        if len(tokens) == 1 and not self.pending:  # a plain step's one token, most often: nothing to join, nothing to cut
            token = tokens[0]
            text = self.vocabulary.whole.get(token)
            if text is not None and token not in skipped:
                return text
        bytes_of = self.vocabulary.bytes_of
        data = self.pending + b"".join([bytes_of(token) for token in tokens if token not in skipped])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self.pending = data[used:]
        return text

    def flush(self) -> str:
        text = self.pending.decode(errors="replace")
        self.pending = b""
        return text


class ByteFallbackStream(Detokenizer):
    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        self.vocabulary = vocabulary
        self.skipped = skipped
        self.run = bytearray()  # byte tokens whose run has not ended
        self.to_strip = vocabulary.strip  # leading spaces still to be dropped

    def feed(self, tokens: Sequence[int]) -> str:
        pieces: list[str] = []
        for token in tokens:
            text = None if token in self.skipped else self.vocabulary.tokenizer.id_to_token(token)
            if text is None:
                continue
            text = text.replace(*self.vocabulary.replace)
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                try:
                    self.run.append(int(text[3:5], 16))
                    continue
                except ValueError:
                    pass
            pieces += (self._end_run(), text)
        return self._stripped("".join(pieces))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        try:
            text = self.run.decode()
        except UnicodeDecodeError:
            text = "\ufffd" * len(self.run)
        self.run.clear()
        return text

    def _stripped(self, text: str) -> str:
        while self.to_strip and text:
            if text[0] != " ":
                self.to_strip = 0
                break
            text = text[1:]
            self.to_strip -= 1
        return text


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the other bytes for characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@lru_cache(maxsize=1)
def _byte_of_code() -> dict[int, int]:
    """The same by code points, as the codec wants it: one call a token instead of a generator."""
    return {ord(char): byte for char, byte in byte_of_char().items()}


def _replacement(step: dict[str, Any]) -> tuple[str, str]:
    pattern = step["pattern"].get("String")
    if pattern is None:
        raise ArtifactError("tokenizer.json: decoder.decoders[0]: only a plain string can be replaced")
    return pattern, step["content"]
