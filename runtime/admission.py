"""What a request must be before it may queue: every check a caller can fail, made before anything runs (law L7)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, Union, cast

from mlsdc.runtime.detokenize import Detokenizer
from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.grammar import GrammarCompiler
from mlsdc.runtime.manifest import Manifest
from mlsdc.runtime.request import Request
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.scheduler import Scheduler
from mlsdc.runtime.step import MAX_BANS
from mlsdc.runtime.tokenizer import Tokenizer

Prompt = Union[str, Sequence[int], Sequence[Mapping[str, Any]]]


class Admission:
    """Makes requests of prompts and parameters, for one engine. Thread-safe: it reads only what never changes."""

    def __init__(self, manifest: Manifest, scheduler: Scheduler, tokenizer: Tokenizer | None, drafting_levels: Sequence[str],
                 grammars: GrammarCompiler | None = None) -> None:
        """`drafting_levels`: names of the levels this engine drafts with; `grammars` None: the device cannot mask."""
        self.manifest = manifest
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.drafting_levels = tuple(drafting_levels)
        self.grammars = grammars

    def prepare(self, prompt: Prompt, params: SamplingParams, listener: deque[Request], priority: int = 0) -> Request:
        """Validate everything a request could break; nothing has run before this succeeds (law L7)."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority: {priority!r}, expected an integer")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling params: {params!r}, expected a SamplingParams")
        tokens = self.tokenize(prompt)
        limits, model = self.manifest.limits, self.manifest.model
        if not tokens:
            raise RequestError("prompt: empty, expected at least one token")
        if len(tokens) >= limits.max_model_len:
            raise RequestError(
                f"prompt: {len(tokens)} tokens, at most {limits.max_model_len - 1} (limits.max_model_len {limits.max_model_len})")
        if params.max_tokens is not None and len(tokens) + params.max_tokens > limits.max_model_len:
            raise RequestError(
                f"max_tokens: {params.max_tokens} after a prompt of {len(tokens)}, at most {limits.max_model_len - len(tokens)} "
                f"(limits.max_model_len {limits.max_model_len}); leave it out for the rest")
        max_length = limits.max_model_len if params.max_tokens is None else len(tokens) + params.max_tokens
        if params.min_tokens > max_length - len(tokens):
            raise RequestError(f"min_tokens: {params.min_tokens}, at most {max_length - len(tokens)} after this prompt")
        for i, token in enumerate(params.stop_token_ids):
            if token >= model.vocab_size:
                raise RequestError(f"stop_token_ids[{i}]: {token}, expected a token id below {model.vocab_size}")
        for token in params.logit_bias:
            if token >= model.vocab_size:
                raise RequestError(f"logit_bias[{token}]: expected a token id below {model.vocab_size}")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop: this engine has no tokenizer: use stop_token_ids")
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.eos_token_ids))
        if len(stops) > MAX_BANS:
            raise RequestError(f"stop_token_ids: {len(stops)} end tokens in all, at most {MAX_BANS}")
        budget = self.draft_budget(params)
        needed = self.scheduler.pages_needed(max_length, budget)
        if not self.scheduler.ever_fits(max_length, budget):
            pool = self.scheduler.pool
            wide = ", larger ones of 16 bits among them" if pool.wide else ""
            raise RequestError(
                f"prompt and max_tokens: up to {max_length} tokens need {needed} KV pages{wide}, the pool has {pool.num_pages}: "
                "ask for fewer tokens or give Engine.load a larger pool")
        request = Request(
            tokens, params, max_length=max_length, stop_ids=frozenset(stops), budget=budget, detokenizer=self._detokenizer(params),
            listener=listener, priority=priority)
        if params.grammar is not None:
            if self.grammars is None:
                raise RequestError("grammar: this artifact's kernels know none: compile it again")
            request.grammar = self.grammars.matcher(params.grammar)
        for _ in range(params.n - 1):
            request.fork(self._detokenizer(params))
        return request

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        return self.tokenizer.stream(skip_special_tokens=params.skip_special_tokens) if self.tokenizer else None

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, a chat, or checked token ids. Raises RequestError."""
        if not isinstance(prompt, str) and (not isinstance(prompt, Sequence) or isinstance(prompt, bytes)):
            raise RequestError(f"prompt: {type(prompt).__name__}, expected text, token ids or chat messages")
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], Mapping)):
            if self.tokenizer is None:
                raise RequestError("prompt: this engine has no tokenizer: give token ids")
            if isinstance(prompt, str):
                return self.tokenizer.encode(prompt)
            return self.tokenizer.chat(cast("Sequence[Mapping[str, Any]]", prompt))
        tokens = []
        vocab_size = self.manifest.model.vocab_size
        for i, token in enumerate(cast("Sequence[int]", prompt)):
            try:
                number = -1 if isinstance(token, bool) else index(token)
            except TypeError:
                number = -1
            if not 0 <= number < vocab_size:
                raise RequestError(f"prompt[{i}]: {token!r}, expected a token id from 0 to {vocab_size - 1}")
            tokens.append(number)
        return tokens

    def draft_budget(self, params: SamplingParams) -> int:
        """Most nodes a step may draft for a request with these parameters. Raises RequestError."""
        plan, speculation = self.manifest.plan, params.speculation
        most = min(plan.max_draft_tokens, self.manifest.limits.max_tree_nodes)
        if speculation is None:
            return min(plan.draft_tokens, most) if self.drafting_levels else 0
        if speculation.max_draft_tokens is not None and speculation.max_draft_tokens > most:
            raise RequestError(f"speculation.max_draft_tokens: {speculation.max_draft_tokens}, this artifact verifies at most {most}")
        names = [level.name for level in self.manifest.levels[:-1]]
        for name in speculation.levels or ():
            if name not in names:
                raise RequestError(
                    f"speculation.levels: '{name}' is not a drafting level of this artifact; it has {', '.join(names) or 'none'}")
        if not speculation.enabled or not self.drafting_levels:
            return 0
        if speculation.levels is not None and not set(speculation.levels) & set(self.drafting_levels):
            return 0
        return min(plan.draft_tokens, most) if speculation.max_draft_tokens is None else speculation.max_draft_tokens
