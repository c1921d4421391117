"""Counting: token sequences -> the static table of an n-gram level (runtime/levels/counts.py has its format).

Every pair (context of 0..order tokens, token after it) is worth what it tells beyond the context one token shorter,

    (count - 1/2) * log(count / total / p'),    p' the interpolated estimate of the shorter context

and the table keeps the pairs worth most, as many as the file's size allows, at most MAX_TOP of a context (entropy pruning after Stolcke
2000, by Witten-Bell estimates). The same texts in the same order give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlsdc.compiler.errors import CompileError
from mlsdc.runtime.levels.counts import (
    CONTEXT,
    FORMAT,
    MAX_TOP,
    MAX_VOCAB,
    MIX,
    SEED,
    STEP,
    code_values,
)
from mlsdc.runtime.step import Array

LOAD = 0.75  # of the table's slots, how many are taken at most
ENTRY_BYTES = 5
HEADER_BYTES = 2048


@dataclass(frozen=True)
class Counted:
    """What a corpus came to. `entries` are those of the table, out of `pairs` different (context, token)."""

    tokens: int
    pairs: int
    entries: int
    num_bytes: int


@dataclass(frozen=True)
class _Order:
    """Pairs with contexts of one length: pair i is `token[i]` after the context of hash `context[i]`, `count[i]` times."""

    context: Array
    token: Array
    count: Array
    group: Array  # index of the context among this order's
    total: Array  # of the pair's context
    distinct: Array
    worth: Array


def write_counts(path: Path, texts: Iterable[tuple[Sequence[int], int]], *, order: int, vocab_size: int, max_bytes: int,
                 tokenizer: str, source: str) -> Counted:
    """Count texts and write the table. A text is its tokens and where counting starts: what lies before is context only.

    `tokenizer` is what `tokenizer_id` says of the tokenizer. Raises CompileError.
    """
    history, counted = _history(texts, order, vocab_size)
    if not len(counted):
        raise CompileError("counts: the data has no token to count")
    orders = _pairs(history, counted, order, vocab_size)
    vocab_bytes = 4 * min(MAX_VOCAB, len(np.unique(orders[0].token)))
    room = int((max_bytes - HEADER_BYTES - vocab_bytes) / ENTRY_BYTES * LOAD)
    if room < 64:
        raise CompileError(f"counts: {max_bytes} bytes are too few for a table; expected at least {1024 + HEADER_BYTES + vocab_bytes}")
    kept = _choose(orders, room)
    entries, kinds, vocab = _table(orders, kept)
    metadata = {"format": FORMAT, "order": str(order), "vocab_size": str(vocab_size), "tokenizer": tokenizer,
                "counted": str(len(counted)), "source": source}
    num_bytes = _write(path, {"entries": entries, "vocab": vocab, "kinds": kinds}, metadata)
    return Counted(len(counted), sum(len(o.token) for o in orders), int((kinds > 0).sum()), num_bytes)


def _history(texts: Iterable[tuple[Sequence[int], int]], order: int, vocab_size: int) -> tuple[Array, Array]:
    """All texts in one array, `order` fillers (-1) before each, and the places of the tokens that count."""
    parts, places, at = [], [], 0
    for tokens, start in texts:
        text = np.asarray(tokens, np.int64)
        if len(text) and not 0 <= text.min() <= text.max() < vocab_size:
            raise CompileError(f"counts: token id {text.min() if text.min() < 0 else text.max()} is not one of the model's {vocab_size}")
        text = text[max(0, start - order) :]
        start = min(start, order)
        parts += [np.full(order, -1, np.int64), text]
        places.append(np.arange(at + order + start, at + order + len(text)))
        at += order + len(text)
    return (np.concatenate(parts), np.concatenate(places)) if parts else (np.zeros(0, np.int64), np.zeros(0, np.int64))


def _pairs(history: Array, counted: Array, order: int, vocab_size: int) -> list[_Order]:
    contexts = np.full(len(counted), SEED, np.uint64)
    shorter = np.full(len(counted), 1 / vocab_size)  # estimate of each counted token one context shorter
    orders, places = [], counted
    for length in range(order + 1):
        if length:
            before = history[places - length]
            there = before >= 0
            places, shorter = places[there], shorter[there]
            contexts = _longer(contexts[there], before[there])
        tokens = history[places]
        if not len(places):
            break
        order_, estimate = _count(contexts, tokens, shorter)
        orders.append(order_)
        shorter = estimate
    return orders


def _longer(contexts: Array, tokens: Array) -> Array:
    x = contexts + (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(STEP)
    x = (x ^ x >> np.uint64(32)) * np.uint64(MIX)
    mixed: Array = x ^ x >> np.uint64(29)
    return mixed


def _count(contexts: Array, tokens: Array, shorter: Array) -> tuple[_Order, Array]:
    """The pairs of one order, sorted by (context, count down, token), and the estimate of every occurrence."""
    by = np.lexsort((tokens, contexts))
    c, t = contexts[by], tokens[by]
    first = np.r_[True, (c[1:] != c[:-1]) | (t[1:] != t[:-1])]
    starts = np.flatnonzero(first)
    count = np.diff(np.r_[starts, len(c)])
    context, token, below = c[starts], t[starts], shorter[by][starts]
    new = np.r_[True, context[1:] != context[:-1]]
    group = np.cumsum(new) - 1
    total = np.bincount(group, weights=count)[group]
    distinct = np.bincount(group)[group]
    estimate = (count + distinct * below) / (total + distinct)
    worth = (count - 0.5) * np.log(np.maximum(count / total / below, 1.0001))
    back = np.empty(len(c))
    back[by] = estimate[np.cumsum(first) - 1]
    rank = np.lexsort((token, -count, group))
    return _Order(context[rank], token[rank], count[rank], group[rank], total[rank], distinct[rank], worth[rank]), back


def _choose(orders: Sequence[_Order], room: int) -> list[Array]:
    """Which pairs of each order stay: the worthiest, so many that with their contexts' own entries they fill at most `room` slots."""
    able = []
    for order in orders:
        place = np.arange(len(order.group)) - np.searchsorted(order.group, order.group)  # among its context's
        able.append(place < MAX_TOP)
    worth = np.concatenate([np.where(ok, order.worth, -np.inf) for order, ok in zip(orders, able, strict=True)])
    by_worth = np.argsort(-worth, kind="stable")
    low, high = 0, int(np.isfinite(worth).sum())
    while low < high:  # the most pairs that fit
        middle = (low + high + 1) // 2
        if _slots(orders, _marked(orders, by_worth[:middle])) <= room:
            low = middle
        else:
            high = middle - 1
    return _marked(orders, by_worth[:low])


def _marked(orders: Sequence[_Order], pairs: Array) -> list[Array]:
    mark = np.zeros(sum(len(order.token) for order in orders), bool)
    mark[pairs] = True
    return np.split(mark, np.cumsum([len(order.token) for order in orders])[:-1])


def _slots(orders: Sequence[_Order], kept: Sequence[Array]) -> int:
    own = sum(len(np.unique(order.group[keep & (order.distinct > 1)])) for order, keep in zip(orders, kept, strict=True))
    return own + sum(int(keep.sum()) for keep in kept)


def _table(orders: Sequence[_Order], kept: Sequence[Array]) -> tuple[Array, Array, Array]:
    """The open-addressed table: frequent contexts first, so that they lie nearest to their home."""
    tokens = np.concatenate([order.token[keep] for order, keep in zip(orders, kept, strict=True)])
    ids, frequency = np.unique(tokens, return_counts=True)
    if len(ids) > MAX_VOCAB:
        ids = np.sort(ids[np.argsort(-frequency, kind="stable")[:MAX_VOCAB]])
        kept = [keep & np.isin(order.token, ids) for order, keep in zip(orders, kept, strict=True)]
    rows = []
    token_codes, context_codes = code_values(3, CONTEXT), code_values(4, 256)
    most, most_total = int(token_codes[-1]), int(context_codes[-1])
    for order, keep in zip(orders, kept, strict=True):
        context, group = order.context[keep], order.group[keep]
        scale = np.maximum(1.0, np.maximum(order.total[keep] / most_total, order.total[keep] / most))  # codes end: share out what is beyond
        count = np.maximum(1, order.count[keep] / scale).astype(np.int64)
        kind = np.searchsorted(token_codes, count, side="right") - 1
        rows.append(np.stack([context, np.searchsorted(ids, order.token[keep]).astype(np.uint64), kind.astype(np.uint64),
                              order.total[keep].astype(np.uint64), np.ones(len(context), np.uint64)], 1))
        own = np.r_[True, group[1:] != group[:-1]] & (order.distinct[keep] > 1) if len(group) else np.zeros(0, bool)
        total = np.searchsorted(context_codes, np.ceil(order.total[keep] / scale)[own])
        different = np.searchsorted(context_codes, np.ceil(order.distinct[keep] / scale)[own])
        rows.append(np.stack([context[own], (total << 8 | different).astype(np.uint64), np.full(own.sum(), CONTEXT, np.uint64),
                              order.total[keep][own].astype(np.uint64), np.zeros(own.sum(), np.uint64)], 1))
    table = np.concatenate(rows)
    kind = table[:, 2].astype(np.int64)
    table = table[np.lexsort((table[:, 1], -kind, table[:, 4], table[:, 0], -table[:, 3].astype(np.int64)))]
    slots = int(len(table) / LOAD) + 1
    entries, kinds = np.zeros(slots, np.uint32), np.zeros(slots, np.uint8)
    home = ((table[:, 0] >> np.uint64(32)) * np.uint64(slots) >> np.uint64(32)).astype(np.int64)
    words = (table[:, 0] & np.uint64(0xFFFF)) << np.uint64(16) | table[:, 1]
    taken = [False] * slots
    for at, word, kind_ in zip(home.tolist(), words.tolist(), table[:, 2].tolist(), strict=True):
        while taken[at]:
            at = at + 1 if at + 1 < slots else 0
        taken[at] = True
        entries[at], kinds[at] = word, kind_
    return entries, kinds, ids.astype(np.int32)


def _write(path: Path, tables: dict[str, Array], metadata: dict[str, str]) -> int:
    dtypes = {"uint32": "U32", "int32": "I32", "uint8": "U8"}
    header: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, table in tables.items():
        header[name] = {"dtype": dtypes[table.dtype.name], "shape": [len(table)], "data_offsets": [at, at + table.nbytes]}
        at += table.nbytes
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-(8 + len(text)) % 64)
    data = len(text).to_bytes(8, "little") + text + b"".join(table.tobytes() for table in tables.values())
    try:
        path.write_bytes(data)
    except OSError as error:
        raise CompileError(f"{path}: cannot be written: {error.strerror}") from None
    return len(data)
