"""Static counts of an n-gram level: an open-addressed table in one memory-mapped file, read-only, a few bytes an entry.

A file of `mlsdc train --level counts` is a safetensors file (metadata: FORMAT, order, tokenizer, vocab_size, counted, source) of

  entries u32[slots]   tag << 16 | index: `tag` are the low 16 bits of the context's hash, `index` a place in `vocab`
  kinds   u8[slots]    0 empty; 1..127 a token that followed the context, its count as a code; 128 the context's own entry, whose index
                       field is codes of its total and of how many different tokens followed: total << 8 | different
  vocab   i32[n]       token ids, at most 65536

Entries of a context lie in probing order from its home slot, `(hash >> 32) * slots >> 32`: its own entry first, then its tokens, the most
frequent first. A context that only ever one token followed has no entry of its own. A 16-bit tag lets one lookup in some thousands find
another context's counts; a draft is verified, so that costs nothing but the draft.

Codes are small floats (3 or 4 bits of mantissa): counts round down, totals up, so that no probability exceeds 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.safetensors import SafetensorsFile
from mlsdc.runtime.step import Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = "mlsdc-counts-1"
CONTEXT = 128  # of `kinds`: a context's own entry
MAX_VOCAB = 1 << 16
MASK = (1 << 64) - 1
SEED, STEP, MIX = 0x5851F42D4C957F2D, 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D  # templates/tir/ngram.jinja


class Found(NamedTuple):
    """What is known of a context: `top` are (token, count), most frequent first."""

    total: int
    distinct: int
    top: list[tuple[int, int]]


def longer(context: int, token: int) -> int:
    """Hash of a context one token longer (further back) than the one of hash `context`; SEED is that of no tokens."""
    x = (context + (token + 1) * STEP) & MASK
    x = ((x ^ x >> 32) * MIX) & MASK
    return x ^ x >> 29


def context_hash(tokens: Sequence[int]) -> int:
    h = SEED
    for token in reversed(tokens):
        h = longer(h, token)
    return h


def decoded(code: int, bits: int) -> int:
    """The number a code with `bits` bits of mantissa stands for: itself up to 2^bits, then with ever larger steps."""
    exponent, mantissa = code >> bits, code & ((1 << bits) - 1)
    return mantissa if exponent == 0 else ((1 << bits) + mantissa) << (exponent - 1)


def code_values(bits: int, codes: int) -> Array:
    """decoded(0), decoded(1), ... i64."""
    return np.array([decoded(code, bits) for code in range(codes)], np.int64)


def tokenizer_id(tokenizer: Tokenizer) -> str:
    """sha256 over the texts of all token ids in order: the same for two files that say the same differently."""
    digest = hashlib.sha256()
    for token, text in sorted((i, t) for t, i in tokenizer.get_vocab(with_added_tokens=True).items()):
        digest.update(f"{token}\0{text}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


class Counts:
    """An opened file. `entries`, `kinds` and `vocab` are what the native search reads."""

    def __init__(self, entries: Array, kinds: Array, vocab: Array, order: int) -> None:
        self.entries, self.kinds, self.vocab, self.order = entries, kinds, vocab, order
        self.slots = len(kinds)

    @staticmethod
    def none() -> Counts:
        return Counts(np.zeros(1, np.uint32), np.zeros(1, np.uint8), np.zeros(1, np.int32), 0)

    @staticmethod
    def open(path: Path, vocab_size: int) -> Counts:
        """Map a file and check it: nothing in it may lead the search out of its tables. Raises ArtifactError."""
        file = open_file(path)
        found = int_metadata(file, "vocab_size")
        if found != vocab_size:
            raise ArtifactError(f"{path.name}: counts over a vocabulary of {found} tokens, the model has {vocab_size}")
        counts = Counts(file.tensor("entries"), file.tensor("kinds"), file.tensor("vocab"), int_metadata(file, "order"))
        counts.check(path.name, vocab_size)
        return counts

    def check(self, name: str, vocab_size: int) -> None:
        if not (self.entries.ndim == self.kinds.ndim == self.vocab.ndim == 1 and len(self.entries) == self.slots > 0):
            raise ArtifactError(f"{name}: corrupt counts: tables of {len(self.entries)} entries and {self.slots} kinds")
        if self.kinds.all():
            raise ArtifactError(f"{name}: corrupt counts: no slot is empty, so no search would end")
        if self.kinds.max() > CONTEXT:
            raise ArtifactError(f"{name}: corrupt counts: an entry of kind {self.kinds.max()}, at most {CONTEXT} is known")
        if not 0 < len(self.vocab) <= MAX_VOCAB or self.vocab.min() < 0 or self.vocab.max() >= vocab_size:
            ids = len(self.vocab)
            raise ArtifactError(f"{name}: corrupt counts: {ids} token ids, expected 1 to {MAX_VOCAB} of them below {vocab_size}")
        tokens = (self.kinds > 0) & (self.kinds < CONTEXT)
        highest = (self.entries[tokens] & 0xFFFF).max() if tokens.any() else 0
        if highest >= len(self.vocab):
            raise ArtifactError(f"{name}: corrupt counts: an entry names token {highest} of {len(self.vocab)}")

    def find(self, tokens: Sequence[int]) -> Found | None:
        """What followed a context (the tables' definition; the native search is compared with it)."""
        h = context_hash(tokens)
        slot = ((h >> 32) * self.slots) >> 32
        total = distinct = 0
        own = False
        top: list[tuple[int, int]] = []
        while self.kinds[slot]:
            entry, kind = int(self.entries[slot]), int(self.kinds[slot])
            if entry >> 16 == h & 0xFFFF:
                if kind == CONTEXT:
                    total, distinct, own = decoded(entry >> 8 & 0xFF, 4), decoded(entry & 0xFF, 4), True
                elif len(top) < MAX_TOP:
                    count = decoded(kind, 3)
                    top.append((int(self.vocab[entry & 0xFFFF]), count))
                    if not own:
                        total, distinct = total + count, distinct + 1
            slot = (slot + 1) % self.slots
        return Found(total, distinct, top) if total else None


MAX_TOP = 6  # tokens of a context that the search looks at


def open_file(path: Path) -> SafetensorsFile:
    """The file, with the metadata and tensors of FORMAT. Raises ArtifactError."""
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; `mlsdc train --level counts` makes it")
    file = SafetensorsFile(path)
    if file.metadata.get("format") != FORMAT:
        found = file.metadata.get("format", "none")
        raise ArtifactError(f"{path.name}: not counts that this version reads (format {found}, expected {FORMAT})")
    for name, dtype in (("entries", "U32"), ("kinds", "U8"), ("vocab", "I32")):
        info = file.tensors.get(name)
        if info is None or info.dtype != dtype:
            raise ArtifactError(f"{path.name}: corrupt counts: no table '{name}' of {dtype}")
        if info.begin % 4:
            raise ArtifactError(f"{path.name}: corrupt counts: table '{name}' starts at byte {info.begin}, expected a multiple of 4")
    return file


def int_metadata(file: SafetensorsFile, key: str) -> int:
    text = file.metadata.get(key, "")
    if not text.isdecimal():
        raise ArtifactError(f"{file.path.name}: corrupt counts: {key} is '{text}', expected a number")
    return int(text)
