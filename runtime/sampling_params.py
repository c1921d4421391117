"""How one request wants its tokens chosen and ended. Names are vLLM's; every field is checked when the object is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.step import MAX_BIAS, MAX_LOGPROBS

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_TEMPERATURE = 100.0
MAX_TOP_K = (1 << 31) - 1
MAX_REPETITION = 100.0
GRAMMARS = ("json_object", "json_schema", "regex", "lark")


@dataclass(frozen=True)
class Speculation:
    """Per-request speculation. It changes the speed only, never the text (law L1).

    `max_draft_tokens` caps the nodes of a step (None: the artifact's plan); `levels` names the levels that may draft (None: all).
    """

    enabled: bool = True
    max_draft_tokens: int | None = None
    levels: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise RequestError(f"speculation.enabled: {self.enabled!r}, expected true or false")
        if self.max_draft_tokens is not None:
            _integer("speculation.max_draft_tokens", self.max_draft_tokens, 0)
        if self.levels is not None:
            object.__setattr__(self, "levels", _strings("speculation.levels", self.levels))


@dataclass(frozen=True)
class Grammar:
    """What the output must be. Tokens that cannot lead there are never chosen, drafted or not; the text ends where it is complete.

    `kind`: `json_object` (any), `json_schema` (`text` is the schema as JSON), `regex`, or `lark` (llguidance's dialect).
    Needs `mlsdc[server]`.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMARS:
            raise RequestError(f"grammar.kind: {self.kind!r}, expected one of {', '.join(GRAMMARS)}")
        if not isinstance(self.text, str):
            raise RequestError(f"grammar.text: {self.text!r}, expected a string")


@dataclass(frozen=True)
class SamplingParams:
    """Defaults are greedy. `max_tokens` None means the rest of the context. Raises RequestError, naming the field.

    In this order, for every row (law L1): logit_bias, penalties (repetition over prompt and output, frequency and presence over output),
    min_tokens, grammar, temperature, top_k (0 and -1: off), top_p of what top_k kept, min_p. `seed` None draws one. `logprobs` are the
    raw model's.

    With `min_tokens`, end tokens are masked and stop strings not looked for until that many tokens are out.
    An end token or stop id is kept in the token ids; neither its text nor a stop string is in the text, unless
    `include_stop_str_in_output`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculation: Speculation | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _integer("top_k", self.top_k, -1, MAX_TOP_K)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, MAX_REPETITION, above=True)
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        _integer("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens: {self.min_tokens}, expected at most max_tokens, which is {self.max_tokens}")
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}: {getattr(self, name)!r}, expected true or false")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.speculation is not None and not isinstance(self.speculation, Speculation):
            raise RequestError(f"speculation: {self.speculation!r}, expected a Speculation")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise RequestError(f"grammar: {self.grammar!r}, expected a Grammar")
        if self.grammar is not None and self.min_tokens:
            raise RequestError(f"min_tokens: {self.min_tokens}, expected 0 with a grammar, which says itself where the text may end")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    expected = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise RequestError(f"{name}: {value!r}, expected {expected}")


def _number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    """`above`: low itself is not allowed. NaN and infinities never are."""
    expected = f"a finite number {'above' if above else 'from'} {low:g}" + ("" if high == math.inf else f" to {high:g}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name}: {value!r}, expected {expected}")
    try:
        fits = math.isfinite(value) and low <= value <= high and not (above and value == low)
    except OverflowError:  # an int beyond the doubles
        fits = False
    if not fits:
        raise RequestError(f"{name}: {value!r}, expected {expected}")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(x, str) for x in items):
        raise RequestError(f"{name}: {value!r}, expected a string or a list of strings")
    return tuple(items)


def _stops(value: Any) -> tuple[str, ...]:
    stops = () if value is None else _strings("stop", value)
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop: {len(stops)} strings, at most {MAX_STOPS}")
    for i, text in enumerate(stops):
        if not text:
            raise RequestError(f"stop[{i}]: empty string, expected text to stop at")
        if len(text) > MAX_STOP_CHARS:
            raise RequestError(f"stop[{i}]: {len(text)} characters, at most {MAX_STOP_CHARS}")
    return stops


def _ids(name: str, value: Any) -> tuple[int, ...]:
    ids = () if value is None else value
    if not isinstance(ids, (list, tuple)):
        raise RequestError(f"{name}: {value!r}, expected a list of token ids")
    for i, token in enumerate(ids):
        _integer(f"{name}[{i}]", token, 0)
    return tuple(ids)


def _bias(value: Any) -> dict[int, float]:
    bias = {} if value is None else value
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias: {value!r}, expected token ids and numbers")
    if len(bias) > MAX_BIAS:
        raise RequestError(f"logit_bias: {len(bias)} tokens, at most {MAX_BIAS}")
    for token, amount in bias.items():
        _integer("logit_bias key", token, 0)
        _number(f"logit_bias[{token}]", amount, -100.0, 100.0)
    return dict(bias)
