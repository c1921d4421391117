"""The one place where tokens become output: they are taken one by one and cut at the first stop, whatever path brought them.

In order, for each token: end token or stop id (not before `min_tokens`; it is kept in the ids, not in the text), stop string (looked for in
the text so far, across token borders), length (`max_tokens` or the end of the context), the end of its grammar.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.request import FinishReason, Request


def commit_tokens(request: Request, tokens: Sequence[int]) -> int:
    """Append `tokens` up to and including the first that ends the request; returns how many were taken."""
    if request.timings.first_token is None and tokens:
        request.timings.first_token = time.perf_counter()
    if request.grammar is not None:
        tokens = tokens[: request.grammar.accept(tokens)]
    kept = _commit_until_stop(request, tokens) if request.params.stop else _commit_until_end(request, tokens)
    if request.grammar is not None and not request.finished:
        if request.grammar.error is not None:
            request.error = RequestError(f"grammar: cannot be matched any further: {request.grammar.error}")
            finish(request, "error")
        elif request.grammar.ended:
            finish(request, "stop")
    return kept


def _commit_until_stop(request: Request, tokens: Sequence[int]) -> int:
    """`commit_tokens` with stop strings: token by token."""
    for count, token in enumerate(tokens, 1):
        request.tokens.append(token)
        may_stop = request.num_output > request.params.min_tokens
        ended = may_stop and token in request.stop_ids
        hidden = ended and not request.params.include_stop_str_in_output
        stop_string = None if hidden else _emit(request, token, may_stop)
        if stop_string is not None:
            finish(request, "stop", stop_string)
        elif ended:
            finish(request, "stop", token)
        elif len(request.tokens) >= request.max_length:
            finish(request, "length")
        if request.finished:
            return count
    return len(tokens)


def _commit_until_end(request: Request, tokens: Sequence[int]) -> int:
    """`commit_tokens` without stop strings: the text of all tokens is decoded at once."""
    params, stop_ids = request.params, request.stop_ids
    first = request.num_output
    count = min(len(tokens), request.max_length - len(request.tokens))
    ended = None
    if not stop_ids.isdisjoint(tokens):
        ended = next((i for i in range(count) if tokens[i] in stop_ids and first + i >= params.min_tokens), None)
        if ended is not None:
            count = ended + 1
    request.tokens += tokens[:count]
    if request.detokenizer is not None:
        shown = count if ended is None or params.include_stop_str_in_output else ended
        if piece := request.detokenizer.feed(tokens[:shown]):
            request.text.append(piece)
    if ended is not None:
        finish(request, "stop", tokens[ended])
    elif len(request.tokens) >= request.max_length:
        finish(request, "length")
    return count


def finish(request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
    """End a request: its last characters leave, whole or as U+FFFD."""
    if not isinstance(stop_reason, str):
        rest = request.held + (request.detokenizer.flush() if request.detokenizer else "")
        request.held = ""
        if rest:
            request.text.append(rest)
    request.finish_reason = reason
    request.stop_reason = stop_reason
    request.statistics.tokens = request.num_output
    request.timings.finished = time.perf_counter()


def _emit(request: Request, token: int, may_stop: bool) -> str | None:
    """Decode one token; text that may begin a stop string is held back. Returns the stop string it completes, if any."""
    if request.detokenizer is None:
        return None
    piece = request.detokenizer.feed((token,))
    if not request.params.stop or not may_stop:
        if piece:
            request.text.append(piece)
        return None
    if not piece:
        return None
    text = request.held + piece
    found = [(at, i) for i, stop in enumerate(request.params.stop) if (at := text.find(stop)) >= 0]
    if found:
        at, i = min(found)
        stop = request.params.stop[i]
        text = text[: at + len(stop) if request.params.include_stop_str_in_output else at]
        request.held = ""
        if text:
            request.text.append(text)
        return stop
    keep = _held_chars(text, request.params.stop)
    request.held = text[len(text) - keep :]
    if len(text) > keep:
        request.text.append(text[: len(text) - keep])
    return None


def _held_chars(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a beginning of a stop string."""
    for length in range(min(len(text), max(map(len, stops)) - 1), 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0
