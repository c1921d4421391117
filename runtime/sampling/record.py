"""A request's sampling as the arrays of the step buffers that the native routine reads (templates/tir/sample.jinja).

The record of a sequence, 16 words of f64: 1/temperature (0: greedy) · top_p · log min_p · repetition, frequency and presence penalty ·
seed (u64) · then i32: top_k, flags · the first position min_tokens allows to end at, bias entries · end tokens, seen tokens · logprobs,
prompt_logprobs (-1: none).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.step import SAMPLING_WORDS, Header, StepBuffers

if TYPE_CHECKING:
    from mlsdc.runtime.request import Request, StepItem

INV_T, TOP_P, LOG_MIN_P, REPETITION, FREQUENCY, PRESENCE, SEED = range(7)  # f64 and u64 words
TOP_K, FLAGS, MIN_UNTIL, NUM_BIAS, NUM_BANS, NUM_SEEN, LOGPROBS, PROMPT_LOGPROBS = range(14, 22)  # i32 words
EDIT, CUT, PENALTIES, GRAMMAR = 1, 2, 4, 8  # bits of FLAGS
MAX_INV_T = 1e30
NO_LOGPROBS, OF_CHOICE = -2, -1  # values of the step's `given`


class Sampler:
    """One sequence's sampling: its record, and the counts that penalties need. `seed` is the 64-bit one of this choice."""

    def __init__(self, params: SamplingParams, seed: int, num_prompt: int, stop_ids: frozenset[int]) -> None:
        self.params = params
        self.seed = seed
        self.num_prompt = num_prompt
        self.penalises = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        self.plain = (params.temperature == 0 and not self.penalises and not params.logit_bias
                      and params.logprobs is None and params.prompt_logprobs is None and params.grammar is None)
        self.bias_ids = np.array(list(params.logit_bias), np.int32)
        self.bias = np.array(list(params.logit_bias.values()), np.float32)
        self.ban_ids = np.array(sorted(stop_ids), np.int32)
        self.min_until = num_prompt + params.min_tokens
        self.record = np.zeros(SAMPLING_WORDS)
        self._words = self.record.view(np.int32)
        self._fill()
        self._place: dict[int, int] = {}  # token -> where it is in the two arrays
        self._seen = np.zeros(256, np.int32)
        self._counts = np.zeros(256, np.int32)
        self._num_counted = 0
        self.seq = -1  # where it was last written

    def _fill(self) -> None:
        p, record = self.params, self.record
        record[INV_T] = 0.0 if p.temperature == 0 else min(1 / p.temperature, MAX_INV_T)
        record[TOP_P:SEED] = (p.top_p, -math.inf if p.min_p == 0 else math.log(p.min_p), p.repetition_penalty, p.frequency_penalty,
                              p.presence_penalty)
        record.view(np.uint64)[SEED] = self.seed
        words = self._words
        cut = p.top_k > 0 or p.top_p < 1
        words[TOP_K] = max(p.top_k, 0)
        masked = p.grammar is not None
        edits = self.penalises or len(self.bias_ids) > 0 or (p.min_tokens > 0 and len(self.ban_ids) > 0) or masked
        words[FLAGS] = EDIT * edits | CUT * cut | PENALTIES * self.penalises | GRAMMAR * masked
        words[MIN_UNTIL] = self.min_until
        words[NUM_BIAS] = len(self.bias_ids)
        words[NUM_BANS] = len(self.ban_ids)
        words[LOGPROBS] = -1 if p.logprobs is None else p.logprobs
        words[PROMPT_LOGPROBS] = -1 if p.prompt_logprobs is None else p.prompt_logprobs

    def active(self, length: int) -> bool:
        """Whether a row of the sequence of `length` tokens may need more than the largest logit."""
        return not self.plain or (length < self.min_until and len(self.ban_ids) > 0)

    def write(self, buffers: StepBuffers, seq: int, tokens: Sequence[int]) -> None:
        """Say how the sequence's rows choose, after `tokens`."""
        if self.penalises:
            self._count(tokens)
            count = len(self._place)
            buffers.seen_ids[seq, :count] = self._seen[:count]
            buffers.seen_counts[seq, :count] = self._counts[:count]
            self._words[NUM_SEEN] = count
        buffers.sampling[seq] = self.record
        if len(self.bias):
            buffers.bias_ids[seq, : len(self.bias)] = self.bias_ids
            buffers.bias[seq, : len(self.bias)] = self.bias
        if self.params.min_tokens:
            buffers.ban_ids[seq, : len(self.ban_ids)] = self.ban_ids

    def update(self, buffers: StepBuffers, seq: int, tokens: Sequence[int]) -> None:
        """What `write` does, where the buffers hold what it or this wrote for fewer of the tokens."""
        if not self.penalises:
            return
        for at in self._count(tokens):
            buffers.seen_ids[seq, at] = self._seen[at]
            buffers.seen_counts[seq, at] = self._counts[at]
        self._words[NUM_SEEN] = len(self._place)
        buffers.sampling[seq] = self.record

    def _count(self, tokens: Sequence[int]) -> list[int]:
        """Count the tokens that came since the last time, those of the output; the prompt's are only listed. Returns their places."""
        changed = []
        for i in range(self._num_counted, len(tokens)):
            at = self._place.setdefault(tokens[i], len(self._place))
            if at == len(self._seen):
                self._seen, self._counts = (np.concatenate([x, np.zeros_like(x)]) for x in (self._seen, self._counts))
            self._seen[at] = tokens[i]
            self._counts[at] += i >= self.num_prompt
            changed.append(at)
        self._num_counted = len(tokens)
        return changed


class RecordWriter:
    """Keeps the step buffers' records up to date; a sequence that stays where it was costs next to nothing."""

    def __init__(self, buffers: StepBuffers) -> None:
        self.buffers = buffers
        self._owners: list[Sampler | None] = [None] * len(buffers.sampling)

    def write(self, items: Sequence[StepItem]) -> bool:
        """Write the records of a step whose rows are in the buffers; False if every row is plain greedy and `sample` need not run."""
        active = [item.out >= 0 and item.request.sampler.active(len(item.request.tokens)) for item in items]
        if not any(active):
            return False
        buffers, owners = self.buffers, self._owners
        buffers.given[: buffers.header[Header.OUT]] = NO_LOGPROBS
        for seq, item in enumerate(items):
            request = item.request
            sampler = request.sampler
            if not active[seq]:
                buffers.sampling[seq] = 0
                owners[seq] = None
                continue
            if owners[seq] is sampler and sampler.seq == seq:
                sampler.update(buffers, seq, request.tokens)
            else:
                sampler.write(buffers, seq, request.tokens)
                owners[seq], sampler.seq = sampler, seq
            if request.params.logprobs is not None or request.wants_prompt_logprobs:
                buffers.given[item.out : item.out + item.outs] = _given(request, item)
        return True


def _given(request: Request, item: StepItem) -> list[int]:
    """Per row that wants logits, whose log probability it reports."""
    own = NO_LOGPROBS if request.params.logprobs is None else OF_CHOICE
    if item.tree or not request.wants_prompt_logprobs:
        return [own] * item.outs
    first = request.num_computed + 1
    given = request.tokens[first : first + item.outs]
    return given + [own] * (item.outs - len(given))
